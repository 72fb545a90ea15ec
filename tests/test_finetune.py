"""Fine-tuning on conversations: which tokens count, how they share rows, and runs from the command line."""

import json
import math
import re

import chats
import numpy as np
import pytest
import torch

import fzero
from fzero import models
from fzero.checkpoint import huggingface
from fzero.core import pytree
from fzero.data import (
    Chat,
    Lengths,
    LineReader,
    RowStream,
    describe_conversations,
    encoder,
    labels_reader,
    open_tokens,
    prepare_conversations,
    prepare_examples,
    prepare_preferences,
    read_chat,
    read_meta,
    verify,
)
from fzero.data.chat import Example, examples_of, spans_of
from fzero.data.examples import messages_of
from fzero.data.token_stream import pack
from fzero.models import Ctx
from fzero.run import config_table, from_table, run_folder, to_json, weights
from fzero.run.config.objectives import OBJECTIVES, Objective

EOS = {"eos_token": "<|im_end|>"}
TWO_TURNS = [
    *next(chats.sums(1)),
    {"role": "user", "content": "and é?"},
    {"role": "assistant", "content": "é is a letter."},
]
FLAGS = chats.FLAGS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chats.tuning_folder(tmp_path_factory.mktemp("chats"))


# ---- templates ----


def test_tokens_and_mask_are_those_of_transformers(folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder / "qwen3")
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    expected = theirs.apply_chat_template(TWO_TURNS, **options)
    (example,) = examples_of(read_chat(folder / "qwen3"), encoder(chats.our_tokenizer()), TWO_TURNS)
    assert example.ids.tolist() == expected["input_ids"]
    assert example.counted.tolist() == [bool(n) for n in expected["assistant_masks"]]
    assert 0 < example.counted.sum() < len(example.ids)


def test_spans_found_by_rendering_are_those_that_the_template_marks():
    assert spans_of(Chat(chats.UNMARKED, EOS), TWO_TURNS) == spans_of(Chat(chats.TEMPLATE, EOS), TWO_TURNS)


def test_a_template_that_leaves_thoughts_out_gives_each_turn_a_text_as_the_model_sees_it():
    thinks = [dict(m, content=f"hm</think>{m['content']}") if m["role"] == "assistant" else m for m in TWO_TURNS]
    texts = spans_of(Chat(chats.FORGETFUL, EOS), thinks)
    said = [[text[a:b] for a, b in spans] for text, spans in texts]
    assert said == [["hm</think>It is 0.<|im_end|>"], ["hm</think>é is a letter.<|im_end|>"]]
    assert "hm" not in texts[1][0].split("and é?")[0]


@pytest.mark.parametrize("template, message", [
    ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
    ("{% for m in messages %}", "no Jinja template"),
    ("{{ 1 / 0 }}", "refuses the conversation: division"),
    ("{{ 'x' * 10 ** 10 }}", "a result of \\* has more than 1,000,000"),
    ("{{ messages * 10 ** 9 }}", "a result of \\* has more than"),
    ("{{ 9 ** (9 ** 9) }}", "a result of \\*\\* has more than"),
    ("{{ '%1000000000d' % 3 }}", "a result of % has more than"),
])  # fmt: skip
def test_a_template_is_sandboxed_and_its_faults_are_one_line(template, message):
    with pytest.raises(ValueError, match=message) as error:
        spans_of(Chat(template, EOS), TWO_TURNS)
    assert "\n" not in str(error.value)


# ---- rows ----


def test_packing_keeps_each_document_once_and_no_row_too_long():
    lengths = np.random.default_rng(0).integers(1, 60, 200)
    rows = pack(lengths, 64)
    assert sorted(i for row in rows for i in row) == list(range(200))
    used = [lengths[row].sum() for row in rows]
    assert max(used) <= 64 and len(rows) <= math.ceil(lengths.sum() / 64) * 1.1
    with pytest.raises(ValueError, match="60 positions and a row has 50"):
        pack(np.array([60]), 50)


@pytest.fixture(scope="module")
def corpus(folder):
    chat = Chat(chats.TEMPLATE, EOS)
    prepare_conversations(folder / "chat.jsonl", folder / "corpus", chat, chats.our_tokenizer(), Lengths(96, 96))
    return folder / "corpus"


def test_an_epoch_has_each_conversation_once(corpus):
    stream = RowStream(open_tokens(corpus), 96, 2)
    rows = len(stream.rows)
    epoch = [stream.samples_at(i, 1) for i in range(rows)]
    assert sum(int(b["mask"].sum()) for b in epoch) == int(stream.tokens.loss_mask.sum())
    again = stream.samples_at(0, rows)
    assert all(torch.equal(again[name], torch.cat([b[name] for b in epoch])) for name in again)
    assert verify(corpus) == []
    total = sum(int(b["mask"].sum()) for b in RowStream(open_tokens(corpus, "val"), 96, 4).eval_batches())
    assert total == int(open_tokens(corpus, "val").loss_mask.sum())


def test_a_conversation_in_a_row_has_the_loss_that_it_has_alone(corpus):
    stream, model = RowStream(open_tokens(corpus), 96, 2), models.build(chats.QWEN3)
    params = models.init_params(model, fzero.random.key(1), torch.float64)
    ctx = Ctx(dtype=torch.float64)
    together = models.loss(model, params, stream.samples_at(0, len(stream.rows)), ctx)
    total = count = 0.0
    tokens = stream.tokens
    for start, end in zip(tokens.docs[:-1], tokens.docs[1:]):
        ids = torch.from_numpy(tokens.tokens[start:end].astype("int64"))[None]
        mask = torch.from_numpy(tokens.loss_mask[start + 1 : end].astype(bool))[None]
        alone = models.loss(model, params, {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": mask}, ctx)
        total, count = total + float(alone.total), count + int(alone.num_tokens)
    assert int(together.num_tokens) == count
    assert abs(float(together.total) - total) < 1e-10 * total


# ---- runs ----


def test_lora_from_a_hugging_face_folder_learns_and_leaves_the_base_alone(folder, tmp_path, fz):
    run, again = tmp_path / "run", tmp_path / "again"
    start = ["finetune", "--init", folder / "qwen3", "--data", folder / "chat.jsonl", "--lora", "rank=8,on=all", *FLAGS,
             "--steps", 30]  # fmt: skip
    code, out, err = fz(*start, "--out", run, "--prompt", "1+1")
    assert (code, err) == (0, "")
    assert "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n" in out
    assert chats.column(run, "loss")[-1] < chats.column(run, "loss")[0] - 0.4
    trained = weights.load(run)
    _, base = huggingface.load_hf(folder / "qwen3")
    after = pytree.named_leaves(trained.params)
    assert all(torch.equal(after[name], leaf) for name, leaf in pytree.named_leaves(base).items())

    # Stopped and resumed: the same bits.
    assert fz(*start, "--out", again, "--stop-at", 13)[0] == 0
    assert fz("finetune", "--resume", "--out", again)[0] == 0
    assert chats.column(again, "loss") == chats.column(run, "loss")
    assert all(torch.equal(leaf, after[name]) for name, leaf in pytree.named_leaves(weights.load(again).params).items())

    # Merged and exported: the same logits, and a chat template.
    assert fz("export", run, "--out", tmp_path / "merged")[0] == 0
    config, merged = huggingface.load_hf(tmp_path / "merged")
    batch = {"tokens": torch.arange(40)[None]}
    expected = models.logits(trained.model, trained.params, batch)
    torch.testing.assert_close(models.logits(models.build(config), merged, batch), expected, rtol=1e-5, atol=1e-5)
    assert read_chat(tmp_path / "merged") == read_chat(folder / "qwen3")._replace(tokens=read_chat(run).tokens)
    code, out, err = fz("sample", run, "--prompt", "1+1", "--max-new-tokens", 5)
    assert (code, err) == (0, "") and out.startswith("<|im_start|>user\n1+1<|im_end|>\n")
    code, out, err = fz("config", "--config", run / "config.json")
    assert (code, err) == (0, "") and 'family = "lora"' in out


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--lora", "rank=4,on=attn", "--quantize", "nf4")])
def test_whole_weights_and_factors_beside_codes_learn_from_an_import(folder, tmp_path, fz, more):
    run = tmp_path / "run"
    assert fz("import", folder / "qwen3", "--out", tmp_path / "import")[0] == 0
    args = ["finetune", "--init", tmp_path / "import", "--data", folder / "chat.jsonl", *FLAGS, "--steps", 30, *more]
    code, _, err = fz(*args, "--out", run)
    assert (code, err) == (0, "")
    assert chats.column(run, "loss")[-1] < chats.column(run, "loss")[0] - 0.2
    assert run_folder.read_config(run).preset == ("finetune-lora" if more else "finetune")
    assert fz("export", run, "--out", tmp_path / "merged")[0] == 0
    code, _, err = fz("report", run)
    assert (code, err) == (0, "")


def test_a_config_with_adapters_is_read_back_equal():
    model = models.lora(models.quantized(models.build(chats.QWEN3), "nf4", 16), 4).config
    value = from_table({"preset": "finetune-lora", "data": {"path": "x.jsonl", "seq_len": 64}}, model)
    assert config_table.from_json(to_json(value)) == value


BAD_LINES = {
    "{": r"chat.jsonl:3: .*JSON",
    '{"text": "x"}': "chat.jsonl:3: the line has no 'messages'; it has text",
    '{"messages": [{"content": "x"}]}': "chat.jsonl:3: message 1 is",
    '{"messages": [{"role": "user", "content": "x"}]}': "chat.jsonl:3: the conversation has no assistant turn",
    '{"messages": [{"role": "assistant", "content": "x"}]}': "chat.jsonl:3: .* refuses .*: roles must alternate",
    json.dumps({"messages": [{"role": "user", "content": "x" * 90}, {"role": "assistant", "content": "y"}]}): (
        "chat.jsonl:3: the conversation has 1.. tokens and the model takes 96 positions"
    ),
}  # fmt: skip


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named_with_its_number(folder, tmp_path, fz, line):
    path = chats.chat_file(tmp_path / "chat.jsonl", 2)
    path.write_text(path.read_text() + line + "\n")
    code, _, err = fz("finetune", "--init", folder / "qwen3", "--data", path, *FLAGS, "--out", tmp_path / "run")
    assert code == 2 and err.count("\n") == 1
    assert re.search(BAD_LINES[line], err), err
    assert not (tmp_path / "run").exists()


BAD_CONTENTS = {
    "null": "the content of message 2, of the assistant, is null, without a call of a tool; it must be one text",
    '[{"type": "text", "text": "x"}]': "the content of message 2, of the assistant, is .*; it must be one text: join",
    "7": "the content of message 2, of the assistant, is 7; it must be one text: write its text",
}


@pytest.mark.parametrize("content", BAD_CONTENTS)
def test_a_content_that_is_no_text_is_said_in_our_words(tmp_path, content):
    turns = f'[{{"role": "user", "content": "x"}}, {{"role": "assistant", "content": {content}}}]'
    path = chats.chat_file(tmp_path / "chat.jsonl", 3)
    path.write_text(path.read_text() + f'{{"messages": {turns}}}\n')
    with pytest.raises(ValueError, match=f"chat.jsonl:4: {BAD_CONTENTS[content]}"):
        prepare_conversations(path, tmp_path / "out", Chat(chats.TEMPLATE, EOS), chats.our_tokenizer(), Lengths(96, 96))


def test_a_null_content_beside_a_call_of_a_tool_is_the_templates_to_write():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert messages_of({"messages": [call]}, "messages") == [call]


def long_lines(path, kind, lengths=(3, 90, 5, 40, 60, 4)):
    """Lines of texts of these lengths, of an objective."""
    rows = {
        "chat": lambda n: {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * n}]},
        "late": lambda n: {"messages": [{"role": "user", "content": "x" * n}, {"role": "assistant", "content": "y"}]},
        "pairs": lambda n: {"prompt": "x", "chosen": "y" * n, "rejected": "z" * n},
        "same": lambda n: {"prompt": "x" * n, "chosen": "y", "rejected": "z"},
        "labels": lambda n: {"text": "x" * n, "label": "a"},
    }
    path.write_text("".join(json.dumps(rows[kind](n)) + "\n" for n in lengths))
    return path


def long_prepared(path, kind, lengths):
    """The meta of lines prepared for rows of these lengths."""
    chat, tokenizer, out = Chat(chats.UNMARKED, EOS), chats.our_tokenizer(), path.parent / f"out-{lengths.too_long}"
    if kind in ("pairs", "same"):
        return prepare_preferences(path, out, None, tokenizer, lengths)
    if kind == "labels":
        read = labels_reader(None, tokenizer, lengths, ("a", "b"), pad=256)
        return prepare_examples(path, out, kind, LineReader(read, lengths.too_long), None, tokenizer)
    return prepare_conversations(path, out, chat, tokenizer, lengths)


@pytest.mark.parametrize(
    ("kind", "row", "dropped", "cut"),  # cut: (lines dropped, texts cut) where they are cut
    [
        *(("chat", 60, 3, (0, 3)), ("late", 60, 3, (2, 1)), ("pairs", 40, 3, (0, 6)), ("same", 40, 3, (3, 0))),
        ("labels", 30, 3, (0, 3)),
    ],
)
def test_lines_that_are_too_long_are_dropped_or_cut_and_counted(tmp_path, kind, row, dropped, cut):
    path = long_lines(tmp_path / "lines.jsonl", kind)
    with pytest.raises(ValueError, match=r"lines.jsonl:2: .*too_long of drop or cut \(--too-long"):
        long_prepared(path, kind, Lengths(row, 96))
    assert not (tmp_path / "out-error").exists()
    left = long_prepared(path, kind, Lengths(row, 96, "drop"))
    assert left["too_long"] == {"dropped": dropped, "cut": 0}
    each = 2 if kind in ("pairs", "same") else 1
    assert sum(of["documents"] for of in left["splits"].values()) == each * (6 - dropped)
    assert f"too long: {dropped} lines dropped, 0 texts cut" in describe_conversations(left)
    short = long_prepared(path, kind, Lengths(row, 96, "cut"))
    assert short["too_long"] == {"dropped": cut[0], "cut": cut[1]}  # dropped: what is to be learnt is at the end
    assert max(of["longest"] for of in short["splits"].values()) <= row // each + 1
    assert all(of["documents"] for of in short["splits"].values())


def test_lines_that_are_all_too_long_are_an_error_that_says_so(tmp_path):
    path = long_lines(tmp_path / "lines.jsonl", "chat")
    with pytest.raises(ValueError, match=r"at least two lines that differ, and it has 0, without 6 that are too long"):
        long_prepared(path, "chat", Lengths(10, 96, "drop"))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["drop", "cut"])
def test_a_run_says_how_many_lines_were_too_long(folder, tmp_path, fz, what):
    path = chats.chat_file(tmp_path / "chat.jsonl", 8)
    row = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 90}]}
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    args = ["finetune", "--init", folder / "qwen3", "--data", path, *FLAGS, "--steps", 2, "--out", tmp_path / "run"]
    code, out, err = fz(*args, "--too-long", what)
    assert code == 0, err
    expected = "1 lines dropped, 0 texts cut" if what == "drop" else "0 lines dropped, 1 texts cut"
    assert f"too long: {expected}" in out + err


MARK = b"\xef\xbb\xbf"  # a byte order mark, as editors for Windows write it


def test_a_byte_order_mark_is_no_part_of_a_conversation_or_a_template(tmp_path):
    path = chats.chat_file(tmp_path / "chat.jsonl", 4)
    metas = []
    for mark in (b"", MARK):
        path.write_bytes(mark + path.read_bytes())
        (tmp_path / "chat_template.jinja").write_bytes(mark + chats.TEMPLATE.encode())
        chat, out = read_chat(tmp_path), tmp_path / f"out{len(mark)}"
        metas.append(prepare_conversations(path, out, chat, chats.our_tokenizer(), Lengths(96, 96)))
    assert metas[0]["sums"] == metas[1]["sums"] and read_chat(tmp_path).template == chats.TEMPLATE


MISTAKES = [
    (["--too-long", "shorten"], "data.too_long is 'shorten'"),
    (["--lora", "rank=4,on=w_x"], "targets 'w_x' matches no leaf of the blocks"),
    (["--lora", "rank=99"], "rank is 99"),
    (["--lora", "rang=4"], "'rang=4' is not rank=R"),
    (["--quantize", "nf4"], "--quantize needs --lora"),
    (["--model", "llama-tiny"], "No such option"),
    (["--set", "model.d_model=8"], "--init sets the model's sizes"),
    (["--seq-len", "20"], "data.seq_len is 20; use a seq_len of"),
    (["--chat-template", "none.jinja"], "none.jinja: no such file"),
]


@pytest.mark.parametrize("more, message", MISTAKES, ids=[m[0][0][2:] + str(i) for i, m in enumerate(MISTAKES)])
def test_a_mistake_is_one_clear_line(folder, tmp_path, fz, more, message):
    flags = FLAGS if more[0] != "--seq-len" else [f for f in FLAGS if f not in ("--seq-len", 96)]
    args = ["finetune", "--init", folder / "qwen3", "--data", folder / "chat.jsonl", *flags, "--out", tmp_path / "run"]
    code, _, err = fz(*args, *more)
    assert code == 2 and message in err


def test_a_model_without_a_chat_template_asks_for_one(folder, tmp_path, fz):
    chats.qwen3_folder(tmp_path / "bare", template="")
    args = ["finetune", "--init", tmp_path / "bare", "--data", folder / "chat.jsonl", *FLAGS, "--out", tmp_path / "run"]
    code, _, err = fz(*args)
    assert code == 2 and "bare: has no chat template" in err and "--chat-template FILE.jinja" in err


class Echo(Objective):
    """Lines {"echo": TEXT}, of which each token counts, twice as much as in a text."""

    def with_loss(self, config, model):
        def doubled(*arguments):
            loss = model.head(*arguments)
            return loss._replace(total=2 * loss.total)

        return model._replace(head=doubled)

    def prepare(self, lines):
        def read(row):
            ids = encoder(lines.tokenizer)(row["echo"])[0]
            return [Example(ids, np.ones(len(ids), bool))]

        place = (lines.path, lines.out, self.corpus)
        return prepare_examples(*place, LineReader(read), lines.chat, lines.tokenizer), ["echoes count whole"]


def test_another_objective_is_one_value(folder, tmp_path, fz, monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "echo", Echo("echo", "echoes", "echo", "echo", rates=(1e-2, 1e-1)))
    (tmp_path / "echo.jsonl").write_text("".join(f'{{"echo": "{i} and {i}"}}\n' for i in range(12)))
    command = ("finetune", "--init", folder / "qwen3", "--data", tmp_path / "echo.jsonl", *FLAGS, "--steps", 3)
    code, out, err = fz(*command, "--objective", "echo", "--out", tmp_path / "run")
    assert (code, err) == (0, "") and "echoes count whole" in out and "nats per echo" in out
    config = run_folder.read_config(tmp_path / "run")
    assert (config.preset, config.objective, read_meta(tmp_path / "run" / "data")["kind"]) == (
        "finetune-echo", "echo", "echoes",
    )  # fmt: skip
    losses = chats.column(tmp_path / "run", "loss")
    assert losses[0] > 1.5 * math.log(256)  # of one text about ln of the vocabulary
    code, _, err = fz(*command, "--objective", "ecko", "--out", tmp_path / "other")
    assert code == 2 and "objective is 'ecko' (did you mean echo?)" in err

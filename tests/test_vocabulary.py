"""Tokenizers and tables of other sizes: tokens that a chat template writes and a vocabulary lacks, tokens that are
added (fzero/run/setup/vocabulary.py), and rows for them (fzero/models/presets.py)."""

import dataclasses
import json
import re
import shutil
from dataclasses import replace

import chats
import pytest
import torch
from launched import torchrun
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import fzero
from fzero import data
from fzero.checkpoint import huggingface
from fzero.core import pytree
from fzero.data import Chat, byte_tokenizer, encoder, json_tokenizer, missing_tokens
from fzero.data.auto_tokenizer import template_tokens
from fzero.models import build, frozen_leaves, grow_vocabulary, init_params, logits
from fzero.run import auto_resume, pretrain, tuned_config, weights
from fzero.run.config.run_config import Data
from fzero.run.setup import vocabulary
from fzero.sharding import shapes_of

NEW = ["<|im_start|>", "<|im_end|>"]
FLAGS = [*chats.FLAGS, "--prompt", ""]
TIED, LACKS = replace(chats.QWEN3, vocab_size=257, tied=True), replace(chats.QWEN3, vocab_size=257)


def base_tokenizer(*more):
    """A tokenizer of bytes that has no tokens of a chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, special=True) for text in ("<|endoftext|>", *more)])
    return library


def base_folder(to, config=LACKS, about=None):
    """A base model whose chat template writes tokens that its tokenizer lacks."""
    (to.parent / f"{to.name}-tokenizer").mkdir(parents=True)
    base_tokenizer().save(str(to.parent / f"{to.name}-tokenizer/tokenizer.json"))
    params, options = init_params(build(config), fzero.random.key(0)), {"tokenizer": to.parent / f"{to.name}-tokenizer"}
    huggingface.save_hf(to, config, params, eos=256, architecture="Qwen3ForCausalLM", **options)
    about = about or {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (to / "tokenizer_config.json").write_text(json.dumps(about))
    (to / "chat_template.jinja").write_text(chats.TEMPLATE)
    return to


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("vocabulary")
    for name, config in {"base": LACKS, "tied": TIED, "padded": replace(chats.QWEN3, vocab_size=320)}.items():
        base_folder(place / name, config)
    chats.chat_file(place / "chat.jsonl", 12)
    return place


def tune(fz, place, to, *args, init="base", data="chat.jsonl"):
    """The lines of a run of `fzero finetune`."""
    code, out, err = fz("finetune", "--init", place / init, "--data", place / data, *FLAGS, *args, "--out", to)
    assert (code, err) == (0, "")
    return out.splitlines()


def named(run):
    return pytree.named_leaves(weights.load(run, wide=True).params)


# ---- tokens that a template writes ----

TEMPLATES = {
    chats.TEMPLATE: NEW,
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}": ["<|system|>", "<|user|>",
                                                                                  "<|assistant|>"],
    "{% if x %}<start_of_turn>{% endif %}{{ messages[0].content }}<end_of_turn>": ["<start_of_turn>", "<end_of_turn>"],
    "{{ bos_token }}[INST] {{ messages[0].content }} [/INST]</s>": ["[INST]", "[/INST]", "</s>", "!bos"],
    "<tool_call>{{ messages[0].content }}</tool_call> <name> a < b > c [x] [A] {# <|x|> #}": [],
    "<｜User｜>{{ messages[0].content }}<|turn>": ["<｜User｜>", "<|turn>"],
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
def test_the_tokens_of_a_template_are_named_where_they_are_split(template):
    chat, tokenizer = Chat(template, {"bos_token": "!bos"}), json_tokenizer(base_tokenizer().to_str(), "base", 256)
    wanted = TEMPLATES[template]
    assert set(template_tokens(chat)) == set(wanted)
    assert missing_tokens(chat, tokenizer) == {text: len(text.encode()) for text in template_tokens(chat)}
    assert missing_tokens(chat, data.add_tokens(tokenizer, wanted)) == {}
    assert missing_tokens(chat, json_tokenizer(base_tokenizer(*wanted).to_str(), "base", 256)) == {}


def test_added_tokens_have_the_next_ids_and_are_never_split():
    tokenizer = json_tokenizer(base_tokenizer("<|old|>").to_str(), "base", 256)
    larger = data.add_tokens(tokenizer, ["<|b|>", "<|old|>", "<|a|>"])
    assert (larger.vocab_size, larger.eos, larger.name) == (260, 256, "base")
    assert (
        encoder(larger)("<|a|>x<|b|><|old|>")[0].tolist()[::2] == [259, 258] and len(encoder(larger)("<|a|>")[0]) == 1
    )
    assert data.add_tokens(larger, ["<|a|>"]).vocab_size == 260 and data.add_tokens(tokenizer, []) is tokenizer
    assert data.add_tokens(tokenizer, ["<|a|>", "<|a|>"]).vocab_size == 259
    with pytest.raises(ValueError, match="' ' is no text of one"):
        data.add_tokens(tokenizer, ["<|a|>", " "])
    with pytest.raises(ValueError, match="the tokenizer is bytes"):
        data.add_tokens(byte_tokenizer(), ["<|a|>"])
    holes = json_tokenizer(Tokenizer(models.BPE({"a": 0, "b": 2}, [])).to_str(), "holes", 0)
    with pytest.raises(ValueError, match="holes: its ids have holes, and 'b' has the one that <x> would get"):
        data.add_tokens(holes, ["<x>"])


# ---- rows ----


@pytest.mark.parametrize(
    "config", [LACKS, TIED, fzero.models.lora(build(LACKS), 2).config], ids=["plain", "tied", "lora"]
)
def test_new_rows_are_the_mean_of_the_old_ones_and_the_rest_stays(config):
    params = init_params(build(config), fzero.random.key(1), torch.float64)
    larger, grown = grow_vocabulary(config, params, 300)
    before, after = pytree.named_leaves(params), pytree.named_leaves(grown)
    tables = {"embed/tokens"} | (set() if config.tied else {"head/w"})
    assert before.keys() == after.keys() == pytree.named_leaves(shapes_of(build(larger))).keys()
    for name, leaf in before.items():
        if name in tables:
            new = after[name][257:]
            assert new.shape == (43, 32) and torch.equal(new, leaf.mean(0).expand(43, -1))
        assert torch.equal(after[name][: len(leaf)], leaf)
    tokens = {"tokens": torch.arange(40)[None]}
    old, new = logits(build(config), params, tokens), logits(build(larger), grown, tokens)
    torch.testing.assert_close(new[..., :257], old)
    torch.testing.assert_close(new[..., 257:], old.mean(-1, keepdim=True).expand(-1, -1, 43))
    assert (frozen_leaves(larger) is None) == (frozen_leaves(config) is None)
    assert grow_vocabulary(config, params, 257)[0] == config
    with pytest.raises(ValueError, match=r"vocab_size is 256 and the model has 257 tokens; rows are added only"):
        grow_vocabulary(config, params, 256)


REFUSED = {
    "fewer": ({"model": {"vocab_size": 256}}, "model.vocab_size is 256 and the model has 257 tokens"),
    "too few for the tokens": (
        {"model": {"vocab_size": 258}, "data": {"add_tokens": NEW}}, "258 and the tokenizer has 259 tokens"),
    "another size": ({"model": {"d_model": 64}}, "--init sets the model's sizes"),
    "words at a time": ({"model": {"layer_tokens": "few"}}, "model.layer_tokens is 'few'; it must be a whole number"),
    "no number": ({"model": {"vocab_size": "many"}}, "model.vocab_size is 'many'; it must be a whole number"),
    "no texts": ({"data": {"add_tokens": "<|a|>"}}, "data.add_tokens is '<|a|>'; it must be a list of texts"),
    "empty": ({"data": {"add_tokens": ["<|a|>", ""]}}, "'' is no text of one"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_cannot_be_are_refused_by_name(place, case):
    table, message = REFUSED[case]
    with pytest.raises(ValueError) as error:
        tuned_config(place / "base", table)
    assert message in str(error.value)


def test_how_much_is_computed_at_a_time_is_no_size(place):
    given = {"mlp_tokens": 8, "layer_tokens": 16}
    plain, told = (tuned_config(place / "base", {"model": sizes}).model for sizes in ({}, given))
    assert told == dataclasses.replace(plain, **given) != plain
    lora = {"rank": 2, "alpha": 4.0, "targets": "attn", "dora": False, "vocabulary": False}
    assert tuned_config(place / "base", {"model": given}, lora=lora).model.base == told


# ---- runs ----


def test_a_run_adds_the_tokens_of_its_template(place, tmp_path, fz):
    lines = tune(fz, place, tmp_path / "run", "--steps", 1, "--add-tokens", "template", "--lora", "rank=2")
    assert "added to the tokenizer: <|im_start|> (257), <|im_end|> (258)" in lines
    assert "embed/tokens and head/w: 2 new rows after 257, each the mean of those" in lines
    assert any("trained whole, beside the factors of LoRA" in line for line in lines)
    assert not any("lacks" in line for line in lines)
    # The tables are trained, and of the rest the factors alone.
    _, given = huggingface.load_hf(place / "base")
    after, (_, grown) = named(tmp_path / "run"), grow_vocabulary(LACKS, given, 259)
    same = {name for name, leaf in pytree.named_leaves(grown).items() if torch.equal(after[name], leaf)}
    assert same == pytree.named_leaves(grown).keys() - {"embed/tokens", "head/w"}
    # --auto-resume compares the size below the adapters.
    assert auto_resume.allowed_changes({"model": {"vocab_size": 259}}, tmp_path / "run", None) == {}
    with pytest.raises(ValueError, match="vocab_size is 260 here and 259 in"):
        auto_resume.allowed_changes({"model": {"vocab_size": 260}}, tmp_path / "run", None)
    # The export has them.
    assert fz("export", tmp_path / "run", "--out", tmp_path / "out")[::2] == (0, "")
    table = json.loads((tmp_path / "out/config.json").read_text())
    assert (table["vocab_size"], table["eos_token_id"]) == (259, [256, 258])
    about = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert about["additional_special_tokens"] == NEW
    library = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    assert library.encode("<|im_start|>a<|im_end|>").ids == [257, 64, 258]
    code, _, err = fz("export", tmp_path / "run", "--out", tmp_path / "adapter", "--adapter")
    assert code == 2 and "the tables of the vocabulary are trained too, which are no factors" in err


@pytest.mark.slow
def test_what_splits_a_token_is_said_and_more_are_added_to_a_run(place, tmp_path, fz):
    lines = tune(fz, place, tmp_path / "split", "--steps", 1)
    assert sum("<|im_start|> into 12, <|im_end|> into 10; --add-tokens template" in line for line in lines) == 1
    code, _, err = fz("sample", tmp_path / "split", "--prompt", "1", "--max-new-tokens", 1)
    assert code == 0 and "lacks tokens that the chat template writes" in err and "--add-tokens template" in err
    tune(fz, tmp_path, tmp_path / "run", "--steps", 1, "--add-tokens", "template", init="split",
         data=place / "chat.jsonl")  # fmt: skip
    code, out, err = fz("sample", tmp_path / "run", "--prompt", "1", "--max-new-tokens", 1)
    assert (code, err) == (0, "") and out.startswith("<|im_start|>user\n1<|im_end|>\n")
    # A corpus that was prepared without a token is refused, and more tokens go behind these.
    flags = [*FLAGS, "--steps", 1, "--out", tmp_path / "on", "--add-tokens", "<|more|>", "--init", tmp_path / "run"]
    code, _, err = fz("finetune", *flags, "--data", tmp_path / "run/data")
    assert code == 2 and "was prepared with a tokenizer without <|more|>" in err
    code, out, _ = fz("finetune", *flags, "--data", place / "chat.jsonl")
    assert code == 0 and "<|more|> (259)" in out and "1 new rows after 259" in out


@pytest.fixture(scope="module")
def larger(place):
    """A folder whose tokenizer is larger than its model."""
    shutil.copytree(place / "base", place / "larger")
    base_tokenizer(*NEW).save(str(place / "larger/tokenizer.json"))
    return place / "larger"


def test_a_tokenizer_larger_than_the_model_is_one_line_with_its_remedy(larger, place, tmp_path, fz):
    code, _, err = fz("finetune", "--init", larger, "--data", place / "chat.jsonl", *FLAGS, "--out", tmp_path / "no")
    assert code == 2 and "model.vocab_size is 257 and the tokenizer of " in err
    assert "has 259 tokens; add --set model.vocab_size=259" in err
    value = tuned_config(larger, {"model": {"vocab_size": 259}, "data": {"path": "x.jsonl"}}, lora={})
    assert value.model.vocab_size == 259
    leaves = ("embed/tokens", "head/w", "head/score", "blocks/attn/w_q", "blocks/attn/w_q_lora_a")
    assert [leaf for leaf in leaves if re.search(str(frozen_leaves(value.model)), leaf)] == ["blocks/attn/w_q"]
    code, out, _ = fz("import", larger, "--out", tmp_path / "import")
    assert code == 0 and "2 more than the model; train on with" in out and "--set model.vocab_size=259" in out
    code, _, err = fz("sample", tmp_path / "import", "--prompt", "a", "--chat", "--max-new-tokens", 1)
    assert code == 2 and "prompt 0 has the token 257; the model has the ids 0 to 256" in err


@pytest.mark.slow
def test_the_remedy_serves_texts_too(larger, tmp_path, fz):
    (tmp_path / "a.txt").write_text("a line\n" * 400)
    flags = [one for one in FLAGS if one not in ("--seq-len", 96)]
    text = ["pretrain", "--data", tmp_path / "a.txt", "--seq-len", 8, *flags, "--steps", 1, "--init", larger]
    text += ["--set", f"data.tokenizer={larger / 'tokenizer.json'}", "--out", tmp_path / "run", "--auto-resume"]
    code, _, err = fz(*text)
    assert code == 2 and "the corpus has 259 tokens; add --set model.vocab_size=259" in err
    code, _, err = fz(*text, "--set", 'data.add_tokens=["<|a|>"]')
    assert code == 2 and "data.add_tokens does nothing with objective=text" in err
    code, out, err = fz(*text, "--set", "model.vocab_size=260")
    assert (code, err) == (0, "") and "3 new rows after 257" in out
    assert named(tmp_path / "run")["head/w"].shape == (260, 32)
    assert "has made its 1 steps" in fz(*text, "--set", "model.vocab_size=260")[1]
    code, _, err = fz(*text, "--set", "model.vocab_size=259")
    assert code == 2 and "model.vocab_size is 259 here and 260 in" in err


# ---- beside transformers ----

NAMES = {
    "all there": {"eos_token": "<|endoftext|>"},
    "named and missing": {"eos_token": "<|endoftext|>", "pad_token": "[PAD]", "bos_token": "<BOS>"},
    "a list": {"eos_token": "<|endoftext|>", "additional_special_tokens": ["<X>", "<|im_end|>"]},
    "extra": {"eos_token": "<|endoftext|>", "extra_special_tokens": ["<X>"], "additional_special_tokens": ["<Y>"]},
    "of the model": {"extra_special_tokens": {"image_token": "<I>"}, "additional_special_tokens": ["<Y>"]},
    "decoder": {"added_tokens_decoder": {"400": {"content": "<D>", "special": True},
                                         "300": {"content": "<E>", "special": True}}},
}  # fmt: skip
MAPS = {"all there": None, "a list": {"additional_special_tokens": ["<M>"], "pad_token": "[PAD]"},
        "named and missing": {"additional_special_tokens": ["<M>"]}}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer"])
@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_transformers(name, kind, place, tmp_path):
    transformers = pytest.importorskip("transformers")
    init, out, about = tmp_path / "init", tmp_path / "out", {"tokenizer_class": kind, **NAMES[name]}
    for folder in (init, out):
        shutil.copytree(place / "base", folder)
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
        if MAPS.get(name):
            (folder / "special_tokens_map.json").write_text(json.dumps(MAPS[name]))
    theirs = transformers.AutoTokenizer.from_pretrained(init)
    asked = Data(add_tokens=("<|tool|>", "template", "<|endoftext|>", "<|tool|>"))
    new = [text for text in ("<|tool|>", *NEW) if text not in theirs.all_special_tokens]
    theirs.add_special_tokens({"additional_special_tokens": [*theirs.all_special_tokens, *new]})
    (out / "tokenizer.json").write_text(vocabulary.grown_tokenizer(init, asked.add_tokens, "").json)
    for file, content in vocabulary.with_added(
        vocabulary.start_files(init), vocabulary.added_tokens(asked, init)
    ).items():
        (out / file).write_text(content)
    ours, text = transformers.AutoTokenizer.from_pretrained(out), "<|im_start|>a<X> <Y><|tool|>é<|im_end|><D><M>[PAD]"
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert set(ours.all_special_ids) - {256} == set(theirs.all_special_ids) - {256}


@pytest.mark.slow
@pytest.mark.parametrize("init", ["tied", "padded"])
def test_an_export_has_the_logits_of_the_run(init, place, tmp_path, fz):
    transformers = pytest.importorskip("transformers")
    lora = ["--lora", "rank=2,dora", "--quantize", "nf4"] if init == "tied" else []
    lines = tune(fz, place, tmp_path / "run", "--steps", 2, "--add-tokens", "template", *lora, init=init)
    assert any("no new rows, as the 320" in line for line in lines) == (init == "padded")
    assert fz("export", tmp_path / "run", "--out", tmp_path / "out")[::2] == (0, "")
    trained = weights.load(tmp_path / "run", wide=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = words.apply_chat_template([{"role": "user", "content": "1+1"}], return_tensors="pt")["input_ids"]
    assert ids[0, 0] == 257 and loaded.config.vocab_size == (320 if init == "padded" else 259)
    with torch.no_grad():
        expected = loaded(ids).logits
    torch.testing.assert_close(logits(trained.model, trained.params, {"tokens": ids}), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_grown_tables_are_those_of_resize_token_embeddings(place):
    transformers = pytest.importorskip("transformers")
    for init, config in (("base", LACKS), ("tied", TIED)):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(place / init, dtype=torch.float32)
        theirs.resize_token_embeddings(300, mean_resizing=True)  # drawn with 1e-9 of the covariance
        _, params = huggingface.load_hf(place / init)
        larger, grown = grow_vocabulary(config, params, 300)
        tokens = torch.arange(40)[None]
        with torch.no_grad():
            torch.testing.assert_close(logits(build(larger), grown, {"tokens": tokens}), theirs(tokens).logits,
                                       rtol=1e-4, atol=1e-4)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("objective, init", [("dpo", "tied"), ("reward", "base"), ("classify", "tied")])
def test_pairs_and_labels_grow_too(objective, init, place, tmp_path, fz):
    chats.pair_file(tmp_path / "pairs.jsonl", 12)
    labels = ({"messages": [{"role": "user", "content": f"{i} is"}], "label": "ab"[i % 2]} for i in range(24))
    chats.write_lines(tmp_path / "labels.jsonl", labels)
    path = tmp_path / ("labels.jsonl" if objective == "classify" else "pairs.jsonl")
    lora = ["--lora", "rank=2"] if objective != "reward" else []
    more = ["--objective", objective, "--steps", 2, "--add-tokens", "template", *lora]
    tune(fz, place, tmp_path / "run", *more, init=init, data=path)
    after = named(tmp_path / "run")["embed/tokens"]
    assert after.shape == (259, 32) and not torch.equal(after[257], after[258])
    assert fz("export", tmp_path / "run", "--out", tmp_path / "out")[::2] == (0, "")
    transformers = pytest.importorskip("transformers")
    auto = transformers.AutoModelForCausalLM if objective == "dpo" else transformers.AutoModelForSequenceClassification
    loaded, ids = auto.from_pretrained(tmp_path / "out", dtype=torch.float32).eval(), torch.tensor([[257, 64, 65, 258]])
    trained = weights.load(tmp_path / "run", wide=True)
    with torch.no_grad():
        expected = loaded(ids).logits
    ours = logits(trained.model, trained.params, {"tokens": ids})
    torch.testing.assert_close(ours if objective == "dpo" else ours[:, -1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_run_that_begins_anew_grows_again(place, tmp_path, fz, monkeypatch):
    """A rollback before the first checkpoint, of a run that began with a folder of transformers."""
    more = ["--steps", 3, "--add-tokens", "template", "--set", "guard.nonfinite=rollback"]
    tune(fz, place, tmp_path / "plain", *more)
    make, left = pretrain.build, [1]

    def planted(*args, **options):
        job = make(*args, **options)

        def step(state, batch):
            if int(state.step) in left:
                left.clear()
                state.params["head"]["w"][0, 0] = float("nan")
            return job.train_step(state, batch)

        return job._replace(train_step=step)

    monkeypatch.setattr(pretrain, "build", planted)
    assert any("back to step 0" in line for line in tune(fz, place, tmp_path / "run", *more))
    assert chats.column(tmp_path / "run", "loss") == chats.column(tmp_path / "plain", "loss")


@pytest.mark.parametrize("init, flags", [
    pytest.param("tied", ["--mesh", "tp=2", "--lora", "rank=2"], marks=pytest.mark.slow),
    pytest.param("tied", ["--mesh", "pp=2"], marks=pytest.mark.exhaustive),
    pytest.param("base", ["--zero", "3", "--offload", "params=nvme,opt=nvme"], marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_two_processes_are_one(init, flags, place, tmp_path, fz):
    common = ["--steps", 3, "--micro-batch", 1, "--add-tokens", "template,<|x|>", "--reduce", "canonical",
              "--set", "precision.fp32_matmul=default"]  # fmt: skip
    tune(fz, place, tmp_path / "one", *common, *(flags[2:] if "--lora" in flags else []), init=init)
    start = ["--init", place / init, "--data", place / "chat.jsonl", *FLAGS, *common, *flags]
    torchrun(tmp_path, 2, *start, "--out", "two", verb="finetune", timeout_s=600)
    expected = chats.column(tmp_path / "one", "loss")
    assert chats.column(tmp_path / "two", "loss") == pytest.approx(expected, rel=1e-5)

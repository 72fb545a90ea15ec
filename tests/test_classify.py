"""Runs that learn classes of texts, and rewards, from the command line."""

import json
import re

import chats
import pytest
import torch

from fzero import models
from fzero.checkpoint import huggingface
from fzero.core import pytree
from fzero.data import RowStream, labels_of, open_tokens
from fzero.models import Ctx, head_of
from fzero.run import config_table, run_folder, to_json, weights

FLAGS = [*chats.FLAGS, "--set", "train.eval_every=6"]


def label_rows(n=60):
    """Texts whose label is told by a word in them."""
    for i in range(n):
        word, label = [("well", "good"), ("so", "fair"), ("ill", "bad")][i % 3]
        yield {"text": f"{i * 7 % 50} it went {word}{'.' * (i % 4)}", "label": label}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a Qwen3, a file of texts with labels, and a file of pairs."""
    place = chats.tuning_folder(tmp_path_factory.mktemp("labels"))
    chats.write_lines(place / "labels.jsonl", label_rows())
    return place


def start_of(folder, objective, *more):
    data = "labels.jsonl" if objective == "classify" else "pairs.jsonl"
    return ["finetune", "--objective", objective, "--init", folder / "qwen3", "--data", folder / data, *FLAGS, *more]


def test_lora_learns_the_labels_and_the_run_resumes_and_goes_to_transformers(folder, tmp_path, fz):
    run, resumed = tmp_path / "run", tmp_path / "resumed"
    start = start_of(folder, "classify", "--lora", "rank=8", "--steps", 36, "--lr", "1e-2")
    code, out, err = fz(*start, "--out", run)
    assert (code, err) == (0, "") and "nats per text" in out
    assert "3 labels, with texts to train + to validate: bad 1" in out and "the commonest is 3" in out, out
    config = run_folder.read_config(run)
    assert config.preset == "finetune-classify-lora" and head_of(config.model).labels == ("bad", "fair", "good")
    assert config_table.from_json(to_json(config)) == config
    assert abs(chats.column(run, "loss")[0] - torch.tensor(3.0).log()) < 0.3
    assert chats.column(run, "accuracy")[0] < 0.8 and chats.column(run, "val_accuracy")[-1] > 0.8
    assert "head/score" in dict(pytree.named_leaves(weights.load(run).params))

    assert fz(*start, "--out", resumed, "--stop-at", 7)[0] == 0
    assert fz("finetune", "--resume", "--out", resumed)[0] == 0
    assert chats.column(resumed, "loss") == chats.column(run, "loss")
    after = pytree.named_leaves(weights.load(run).params)
    assert all(torch.equal(leaf, after[n]) for n, leaf in pytree.named_leaves(weights.load(resumed).params).items())

    # Out again, merged: transformers says what the run says of its texts, in rows that are filled.
    transformers = pytest.importorskip("transformers")
    assert fz("export", run, "--out", tmp_path / "out")[0] == 0
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert theirs.config.id2label == {0: "bad", 1: "fair", 2: "good"} and theirs.config.pad_token_id == 256
    tokens, model = open_tokens(run / "data", "val"), models.build(config.model)
    texts = [torch.from_numpy(tokens.tokens[a : b - 1].astype("int64")) for a, b in zip(tokens.docs, tokens.docs[1:])]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=256)
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=(ids != 256).long()).logits
        for text, score in zip(texts, expected):
            found = models.logits(model, weights.load(run).params, {"tokens": text[None]}, Ctx())[0, -1]
            torch.testing.assert_close(found, score, rtol=1e-4, atol=1e-4)
    config, _ = huggingface.load_hf(tmp_path / "out")
    assert config.labels == ("bad", "fair", "good")

    code, _, err = fz("export", run, "--out", tmp_path / "adapter", "--adapter")
    assert code == 2 and "trains a head of scores too, which is no adapter" in err
    code, _, err = fz("sample", run, "--prompt", "x")
    assert code == 2 and "has a head of scores, which says no text" in err, err
    assert fz("report", run)[0] == 0
    said = (run / "report" / "report.md").read_text()
    assert "nats per text" in said and "perplexity" not in said and "nats per token" not in said


@pytest.mark.slow
def test_a_reward_prefers_what_is_chosen(folder, tmp_path, fz):
    run = tmp_path / "run"
    code, out, err = fz(*start_of(folder, "reward", "--steps", 12), "--out", run)
    assert (code, err) == (0, "") and "nats per pair" in out and "pairs of answers" in out
    assert run_folder.read_config(run).preset == "finetune-reward"
    margins = chats.column(run, "margin")
    assert abs(margins[0]) < 0.5 and margins[-1] > 1.0 and chats.column(run, "val_accuracy")[-1] > 0.9
    stream = RowStream(open_tokens(run / "data"), 96, 2)
    assert all(len(row) % 2 == 0 and row[0::2] == [i - 1 for i in row[1::2]] for row in stream.rows)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["classify", "reward"])
def test_quantized_weights_and_a_run_that_goes_on(folder, tmp_path, fz, objective):
    run = tmp_path / "run"
    more = ["--lora", "rank=4", "--quantize", "nf4", "--steps", 4]
    assert fz(*start_of(folder, objective, *more), "--out", run)[::2] == (0, "")
    still = start_of(folder, objective, "--init", run, "--steps", 1, "--lr", 0)
    assert fz(*still, "--out", tmp_path / "on")[::2] == (0, "")
    ended, begun = (pytree.named_leaves(weights.load(place).params) for place in (run, tmp_path / "on"))
    assert all(torch.equal(leaf, begun[name]) for name, leaf in ended.items())
    assert ended["head/score"].shape == (3 if objective == "classify" else 1, 32)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["classify", "reward"])
def test_a_run_starts_from_its_export_and_from_an_adapter_of_it(folder, tmp_path, fz, objective):
    """With the head of transformers' folder, `...ForSequenceClassification`, which another objective refuses."""
    run, out = tmp_path / "run", tmp_path / "out"
    assert fz(*start_of(folder, objective, "--steps", 2), "--out", run)[::2] == (0, "")
    assert fz("export", run, "--out", out)[::2] == (0, "")
    for i, more in enumerate(([], ["--lora", "rank=2"])):
        on = tmp_path / f"on{i}"
        code, _, err = fz(*start_of(folder, objective, "--init", out, "--steps", 1, "--lr", 0, *more), "--out", on)
        assert (code, err) == (0, "")
        ended, begun = (pytree.named_leaves(weights.load(place).params) for place in (run, on))
        assert all(torch.equal(leaf, begun[name]) for name, leaf in ended.items()), objective
    other = {"classify": "reward", "reward": "classify"}[objective]
    code, _, err = fz(*start_of(folder, other, "--init", out, "--steps", 1), "--out", tmp_path / "other")
    assert code == 2 and err.count("\n") == 1 and f"objective is {other}" in err, err
    assert not (tmp_path / "other").exists()


def test_labels_are_names_in_the_alphabets_order_or_numbers_in_theirs(tmp_path):
    for labels, expected in (([10, 9, 2], ("2", "9", "10")), (["b", "a"], ("a", "b"))):
        rows = [{"text": "x", "label": label} for label in labels]
        assert labels_of(chats.write_lines(tmp_path / "a.jsonl", rows)) == expected


GOOD = {"text": "it went well", "label": "good"}
BAD = {
    "no label": ({"text": "x"}, "labels.jsonl:61: the line has no 'label'; it has text"),
    "no text": ({"label": "good"}, "labels.jsonl:61: the line has no 'text' and no 'messages'; it has label"),
    "a number": ({**GOOD, "label": 3}, "labels.jsonl:61: labels must be all names or all numbers; there are 3 and"),
    "a list": ({**GOOD, "label": ["good"]}, "labels.jsonl:61: label is .*; it must be a name or a number"),
    "empty": ({**GOOD, "text": ""}, "labels.jsonl:61: the text is empty; leave the line out"),
    "long": ({**GOOD, "text": "x" * 200}, "labels.jsonl:61: the text has .* the model takes 96 positions"),
    "both": ({**GOOD, "messages": []}, "labels.jsonl:61: the line must have a text or messages"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (i > 1)) for i, n in enumerate(BAD)])
def test_a_bad_line_is_named_with_its_number(folder, tmp_path, fz, name):
    row, message = BAD[name]
    path = chats.write_lines(tmp_path / "labels.jsonl", [*label_rows(), row])
    code, _, err = fz(*start_of(folder, "classify"), "--data", path, "--out", tmp_path / "run")
    assert code == 2 and err.count("\n") == 1 and re.search(message, err), err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_does_not_go_together_is_one_line(folder, tmp_path, fz):
    one = chats.write_lines(tmp_path / "one.jsonl", [{"text": f"{i}", "label": "good"} for i in range(9)])
    rare = chats.write_lines(tmp_path / "rare.jsonl", [*label_rows(), {"text": "odd", "label": "rare"}])
    classify = start_of(folder, "classify", "--steps", 1)
    assert fz(*classify, "--out", tmp_path / "run")[::2] == (0, "")
    on = ["--init", tmp_path / "run", "--out", tmp_path / "on"]
    chosen = chats.write_lines(tmp_path / "p.jsonl", [{"prompt": p, "chosen": "y"} for p in "ab"])
    for args, message in (
        ([*classify, "--data", one, *on[2:]], "all lines have the label 'good'; to tell classes there must be two"),
        ([*classify, "--data", rare, *on], "which is no class of the model; it has bad"),
        (["finetune", "--data", folder / "labels.jsonl", *FLAGS, *on], "objective is chat and the model has a head of"),
        ([*start_of(folder, "reward"), *on], "the model has a head of classes; use --objective classify"),
        ([*start_of(folder, "reward"), "--data", chosen, *on[2:]], "p.jsonl:1: the line has no 'rejected'"),
        ([*start_of(folder, "reward"), "--data", tmp_path / "run" / "data", *on[2:]], "is a corpus of labels"),
        (["pretrain", "--set", "objective=classify", *on[2:]], "the model has no head of scores; fzero finetune"),
    ):
        code, _, err = fz(*args)
        assert code == 2 and message in err and err.count("\n") == 1, (message, err)


@pytest.mark.slow
def test_a_label_that_only_lines_for_validation_have_is_refused(folder, tmp_path, fz):
    from fzero.data.examples import draw_of

    rows = list(label_rows())
    lines = [json.dumps(row).encode() for row in rows]
    first = min(range(len(lines)), key=lambda i: draw_of(lines[i], 0))  # that always is for validation
    for i in range(1000):
        rows[first] = {"text": f"odd {i}", "label": "rare"}
        if draw_of(json.dumps(rows[first]).encode(), 0) < 0.04 * 2**64:
            break
    path = chats.write_lines(tmp_path / "rare.jsonl", rows)
    code, _, err = fz(*start_of(folder, "classify"), "--data", path, "--out", tmp_path / "run")
    assert code == 2 and "the label 'rare' is on 1 of the lines for validation and on none for training" in err, err


@pytest.mark.slow
@pytest.mark.parametrize("classes, objective", [(3, "classify"), (1, "reward")])
def test_a_plan_knows_the_head(tmp_path, fz, classes, objective):
    args = ["plan", "--model", "llama-tiny", "--classes", classes, "--gpu", "h100", "--precision", "bf16", "--no-cache",
            "--set", "optim.name=adamw", "--json"]  # fmt: skip
    code, out, err = fz(*args)
    assert code == 0, err
    sizes = models.preset("llama-tiny")
    model = models.build(sizes)
    expected = models.num_params(models.reward(model) if classes == 1 else models.classify(model, list("abc")))
    assert json.loads(out)["num_params"] == expected
    assert expected == models.num_params(model) - (sizes.vocab_size - classes) * sizes.d_model * (not sizes.tied)
    code, _, err = fz("plan", "--model", "llama-tiny", "--classes", 0)
    assert code == 2 and "--classes is 0; it must be at least 1 and at most 1048576" in err

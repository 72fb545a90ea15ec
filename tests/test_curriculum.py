"""Numbers of a corpus' rows (fzero/data/curriculum.py), orders by them (curriculum.py), and rows in pieces; that every
mesh and resume reads them alike stands in test_data_law.py."""

import json
import math
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from close import assert_close

from fzero import data, models
from fzero import random as keys
from fzero.data import curriculum as curriculum_module
from fzero.data import packing
from fzero.models import Ctx
from fzero.run import from_table
from fzero.run.config import curriculum
from fzero.run.setup import corpus


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("curriculum")
    rng = random.Random(0)
    lines = [" ".join(rng.choice("abcdefg") * rng.randint(1, 4) for _ in range(1 + i % 9)) for i in range(60)]
    (folder / "t.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    data.prepare(folder / "t.jsonl", folder / "text", val_fraction=0.1)
    return folder / "text"


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
def test_numbers_are_those_of_their_definitions(text, packing, monkeypatch):
    tokens = data.open_tokens(text)
    stream = data.TokenStream(tokens, 8, 1, packing=packing)
    monkeypatch.setattr("fzero.data.curriculum.BATCH_TOKENS", 40)  # several parts
    lengths, rare = (data.analyze(text, m, seq_len=8, packing=packing) for m in ("length", "rarity"))
    rows = [[n for n in row if n >= 0] for row in stream.rows.positions(np.arange(len(stream.rows))).tolist()]
    counts = Counter(int(tokens.tokens[n]) for row in rows for n in row)
    total = sum(counts.values())
    assert len(rows) == len(lengths) > 5 and len(set(lengths.tolist())) > 5
    for row, length, rarity in zip(rows, lengths, rare):
        of = {int(np.searchsorted(tokens.docs, n, side="right")) - 1 for n in row}
        assert length == pytest.approx(np.mean([tokens.docs[i + 1] - tokens.docs[i] for i in of]), rel=1e-6)
        assert rarity == pytest.approx(sum(-math.log(counts[int(tokens.tokens[n])] / total) for n in row), rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "part"),
    [
        ("linear", lambda t: t),
        ("root:2", lambda t: t**0.5),
        ("root:3", lambda t: t ** (1 / 3)),
        ("discrete:0.3@0.25,0.6@0.5", lambda t: 0.0 if t < 0.25 else 1 / 8 if t < 0.5 else 0.5),
    ],
)
def test_what_is_allowed_follows_the_schedule(schedule, part):
    growth = data.Growth(schedule, Fraction("0.2"), 1000)
    for progress in range(0, 1001, 7):
        wanted = 200 + 800 * part(progress / 1000)
        assert growth.allowed(1000, progress) == pytest.approx(math.ceil(wanted - 1e-9), abs=0), progress
    assert growth.allowed(1000, 1000) == growth.allowed(1000, 10**9) == 1000 and growth.allowed(3, 0) == 1


def test_of_the_allowed_rows_each_is_as_likely_as_another():
    growth, pieces = data.Growth("linear", Fraction("0.4"), 4), (data.Piece(0, 0, 1, 1),)
    orders = [
        data.Curriculum(curriculum_module.rank(np.arange(5.0)), growth, pieces).numbers(s, 0, 0, 5) for s in range(600)
    ]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders)
    first, second = (Counter(int(order[n]) for order in orders) for n in (0, 1))
    # Allowed: 2, 3, 4, ... rows. The second of 0 to 2 without the first: (1/2 of 1/2, 1/2 of 1/2, 1/2).
    for found, wanted in ((first, (300, 300, 0)), (second, (150, 150, 300))):
        assert all(abs(found[n] - w) < 60 for n, w in enumerate(wanted)) and set(found) <= {0, 1, 2}


def test_more_samples_than_are_allowed_take_the_easiest_of_the_rest():
    growth, pieces = data.Growth("linear", Fraction("0.1"), 1000), (data.Piece(0, 0, 20, 1),)
    own = data.Curriculum(curriculum_module.rank(np.arange(100.0)), growth, pieces)
    order = own.numbers(0, 0, 0, 100).tolist()
    assert sorted(order) == list(range(100)) and all(
        row <= max(n, own.allowed_rows(np.array([n]))[0]) for n, row in enumerate(order)
    )
    assert own.numbers(0, 1, 0, 10).max() < 15 and not own.complete(1) and own.complete(200)


def test_a_large_order_is_drawn_in_parts_as_in_one(monkeypatch):
    growth, pieces = data.Growth("root:2", Fraction("0.1"), 30), (data.Piece(0, 0, 8, 1),)
    whole = data.Curriculum(curriculum_module.rank(np.arange(400.0)), growth, pieces).numbers(3, 0, 0, 400)
    monkeypatch.setattr(curriculum_module, "DRAWN", 64)
    parts = data.Curriculum(curriculum_module.rank(np.arange(400.0)), growth, pieces)
    assert (parts.numbers(3, 0, 0, 400) == whole).all() and (parts.numbers(3, 0, 70, 90) == whole[70:90]).all()


def config_of(**data_values):
    sizes = {
        "family": "llama",
        "vocab_size": 128,
        "d_model": 16,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 1,
        "d_ff": 24,
    }
    own = {"seq_len": 16, **data_values}
    return from_table({"preset": "", "model": {**sizes, "max_len": 16}, "data": own, "train": {"batch": 4, "steps": 8}})


def test_rows_in_pieces_are_rows_of_fewer_tokens(text):
    """Loss and gradient of a batch in pieces are those of the same tokens in shorter rows."""
    config = config_of(path=str(text), seq_len_warmup="4:4:64")
    read = corpus.open_micro_batches(config, text)
    plain = corpus.open_micro_batches(replace(config, data=replace(config.data, seq_len_warmup="")), text)
    model = models.build(config.model)
    params = models.init_params(model, keys.key(0), torch.float64)
    ctx = Ctx(dtype=torch.float64)
    for step, length in ((0, 4), (1, 8), (3, 16)):
        batch, whole = read(4 * step, 0), plain(4 * step, 0)
        assert torch.equal(batch["mask"], whole["mask"]) and torch.equal(batch["targets"], whole["targets"])
        short = {name: leaf.reshape(-1, length) for name, leaf in whole.items()}
        (one, total), (other, expected) = (
            torch.func.grad_and_value(lambda p, b=b: models.loss(model, p, b, ctx).total)(params)
            for b in (batch, short)
        )
        assert batch["mask"].sum() == short["mask"].sum() and abs(total - expected) < 1e-10 * expected
        assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert (
        abs(models.loss(model, params, plain(0, 0), ctx).total - models.loss(model, params, read(0, 0), ctx).total)
        > 1e-3
    )


ERRORS = [
    ({"curriculum_steps": 5}, "data.curriculum_steps is 5 and data.curriculum is ''; name an analysis"),
    ({"curriculum": "rarity"}, "curriculum_tokens 0; give one of them, after which all rows are allowed"),
    ({"curriculum": "a/b", "curriculum_steps": 5}, "data.curriculum is 'a/b'; it is the name of an analysis"),
    (
        {"curriculum": "x", "curriculum_steps": 5, "curriculum_schedule": "cubic"},
        "data.curriculum_schedule is 'cubic'; a schedule is linear, root:DEGREE",
    ),
    (
        {"curriculum": "x", "curriculum_steps": 5, "curriculum_schedule": "discrete:0.5@0.5,0.4@0.6"},
        "its parts rise from curriculum_start=1/10 to 1",
    ),
    (
        {"curriculum": "x", "curriculum_steps": 5, "mixture": "a:1,b:1"},
        "data.mixture is a:1,b:1: it orders the rows of one corpus of text",
    ),
    ({"seq_len_warmup": "4:4"}, "data.seq_len_warmup is '4:4'; a ramp is START:INCREMENT:TOKENS"),
    ({"seq_len_warmup": "16:4:10"}, "begins with data.seq_len=16 or above"),
    ({"seq_len_warmup": "4:4:10", "within_documents": False}, "data.within_documents is false: its pieces do not see"),
]


@pytest.mark.parametrize(("values", "message"), ERRORS, ids=lambda value: str(value)[:40])
def test_what_does_not_go_together_is_refused(values, message):
    with pytest.raises(ValueError) as error:
        config_of(**values)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_analysis_that_changed_ends_the_run_that_began_with_it(text, tmp_path):
    own = data.analyze(text, "rarity", seq_len=16, name="own")
    config = config_of(path=str(text), curriculum="own", curriculum_steps=4)
    began = curriculum.with_digest(config, text)
    assert curriculum.with_digest(began, text) == began and curriculum.curriculum_of(began, text) is not None
    found = curriculum_module.open_analysis(text, "own", 16, "stream")
    assert (found.values == own).all() and began.data.curriculum == f"own@{found.digest}"
    with pytest.raises(ValueError, match="is there already; remove it, or give another name"):
        data.analyze(text, "rarity", seq_len=16, name="own")
    other = replace(began, data=replace(began.data, curriculum="own@0123456789abcdef"))
    with pytest.raises(ValueError, match=f"own beside .* is {found.digest} by now"):
        curriculum.curriculum_of(other, text)
    with pytest.raises(ValueError, match=r"no such analysis; there is .*own-16-stream.* --metric none --seq-len 16"):
        curriculum_module.open_analysis(text, "none", 16, "stream")
    place = text / "analysis-own-16-stream"
    meta = json.loads((place / "meta.json").read_text())
    (place / "meta.json").write_text(json.dumps({**meta, "corpus": "0"}))
    with pytest.raises(ValueError, match="is of another corpus than"):
        curriculum_module.open_analysis(text, "own", 16, "stream")
    (place / "meta.json").write_text(json.dumps(meta))
    (place / "values.npy").write_bytes((place / "values.npy").read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"values\.npy: missing or damaged"):
        curriculum_module.open_analysis(text, "own", 16, "stream")


def test_the_loss_of_a_row_is_the_models(text, fz, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = [f"--set=model.{n}" for n in ("n_layers=1", "d_model=16", "d_ff=24", "max_len=16")]
    run = ("--model", "llama-tiny", *sizes, "--set", "train.compiled=false", "--precision", "fp32", "--seq-len", 16)
    more = ("--steps", 2, "--batch", 4, "--peak-tflops", 1, "--prompt", "", "--out", "run")
    assert fz("pretrain", "--data", text, *run, *more)[0] == 0
    code, out, _ = fz("data", "analyze", text, "--metric", "loss", "--seq-len", 16, "--reference", "run")
    assert code == 0 and out.startswith("loss of ") and "written: " in out
    from fzero.run import weights

    trained, found = weights.load(tmp_path / "run"), curriculum_module.open_analysis(text, "loss", 16, "stream").values
    stream = data.TokenStream(data.open_tokens(text), 16, 1)
    for row in range(0, len(found), 7):
        one = packing.assemble(stream.tokens, stream.rows.positions(np.array([row])))
        loss = models.loss(trained.model, trained.params, one, Ctx())
        assert found[row] == pytest.approx(float(loss.total / loss.num_tokens), rel=1e-5)
    # A run by it; then with an analysis of another length.
    own = ("--set", "data.curriculum=loss", "--set", "data.curriculum_steps=2")
    assert fz("pretrain", "--data", text, *run, *own, *more[:-1], "ordered")[0] == 0
    assert (
        f"loss@{curriculum_module.open_analysis(text, 'loss', 16, 'stream').digest}"
        in (tmp_path / "ordered/config.json").read_text()
    )
    code, _, err = fz("pretrain", "--data", text, *run[:-1], 8, *own, *more[:-1], "none")
    assert code == 2 and "analysis-loss-8-stream: no such analysis" in err and "Traceback" not in err
    (tmp_path / "t.txt").write_text("one text " * 90)
    code, _, err = fz("pretrain", "--data", "t.txt", *run, *own, *more[:-1], "none")
    assert code == 2 and "t.txt is no corpus in a folder" in err and "fzero data prepare " in err
    code, _, err = fz("data", "analyze", text, "--metric", "loss", "--seq-len", 16)
    assert code == 2 and "give --reference RUN" in err

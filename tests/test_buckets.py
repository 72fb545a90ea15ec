"""Batches of documents of like length: each document once in an epoch, alike on every mesh and after every resume, and
learning rates by their sizes."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import chats
import numpy as np
import pytest
import ranks
import torch
from close import assert_close

import fzero
from fzero import data
from fzero.core import pytree
from fzero.data import BucketStream, Size, Tokens
from fzero.data.packing import cut, within_documents
from fzero.run import build, config_table, first_state, from_table, run_folder, to_json
from fzero.run.config.curriculum import lr_scale
from fzero.run.config.stages import count_samples
from fzero.run.measure.metrics_rows import metrics_row
from fzero.run.runner.step_rows import rows_of
from fzero.run.setup import corpus
from fzero.sharding import fake_mesh, gather_on_first

MODEL = {"n_layers": 2, "d_model": 16, "n_heads": 2, "n_kv_heads": 1, "d_ff": 32}
BATCH, STEPS = 4, 20  # of 18 batches an epoch


def hand_made(lengths, **rest):
    docs = np.concatenate([[0], np.cumsum(lengths)])
    return Tokens("by hand", (1 + np.arange(docs[-1]) % 60000).astype(np.uint16), docs, 65536, 0, **rest)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A corpus of bytes, of documents of 2 to 41 tokens."""
    folder, rng = tmp_path_factory.mktemp("buckets"), random.Random(0)
    lengths = [rng.choice((1, 2, 3, 4, 6, 9, 13, 16, 30, 40)) for _ in range(70)]
    lines = ["".join(rng.choice("abcdefg ") for _ in range(length)) for length in lengths]
    (folder / "t.jsonl").write_text("".join(json.dumps({"text": f"{i}{line}"}) + "\n" for i, line in enumerate(lines)))
    data.prepare(folder / "t.jsonl", folder / "text", val_fraction=0.1)
    return folder / "text"


def config_of(path, scaling="sqrt", by="sequences", **tables):
    own = {
        "preset": "llama-tiny",
        "model": MODEL,
        "precision": {"policy": "fp64", "fp32_matmul": "default"},
        "data": {"path": str(path), "packing": "buckets", "seq_len": 16, "bucket_lengths": "4,8,16"},
        "train": {"steps": STEPS, "batch": BATCH, "micro_batch": 1, "compiled": False},
        "optim": {"name": "adamw", "lr": 0.01, "lr_scaling": scaling, "lr_scaling_by": by},
    }
    return from_table(
        {key: value | tables.get(key, {}) if isinstance(value, dict) else value for key, value in own.items()}
        | {key: value for key, value in tables.items() if key not in own}
    )


# ---- the order of documents ----


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n > 1)) for n in range(9)])
def test_every_document_comes_once_in_an_epoch_and_in_its_length(seed):
    rng = np.random.default_rng(seed)
    lengths = (3, 6, 12, 24) if seed % 2 else (8, 16)
    tokens = hand_made(rng.integers(1, 3 * lengths[-1], 150) if seed else [5] * 7)
    stream = BucketStream(tokens, lengths, batch=int(rng.integers(1, 9)), seed=seed)
    pieces, size = cut(within_documents(tokens), lengths[-1]).tolist(), stream.samples_per_epoch
    together, fewer = [], 0
    for epoch in range(3):
        read, batches = [], set()
        for first in range(epoch * size, (epoch + 1) * size, stream.batch):
            length, ranges = stream.sample_ranges(first, stream.batch)
            assert length in lengths and len(ranges) * length == stream.batch * lengths[-1]
            there = [(begin, end) for begin, end in ranges.tolist() if end]
            assert all(end - begin <= length for begin, end in there)
            fewer += len(there) < len(ranges)
            assert stream.size_at(first) == Size(len(there), sum(end - begin for begin, end in there))
            read += there
            batches.add(frozenset(there))
        assert Counter(read) == Counter(map(tuple, pieces))
        together.append(batches)
    assert fewer <= 3 and (seed == 0 or not together[0] & together[1] & together[2])
    held = sum(end - begin for begin, end in pieces)
    assert stream.filled == pytest.approx(1 - held / (size * lengths[-1]))


def test_rows_have_their_documents_and_what_counts():
    tokens = hand_made([3, 9, 2, 5, 30, 1, 8, 4])
    stream = BucketStream(tokens, (4, 8), batch=2, seed=1)
    for step in range(3):
        batch, (length, ranges) = stream.batch_at(step), stream.sample_ranges(2 * step, 2)
        for row, (begin, end) in enumerate(ranges.tolist()):
            own, rest = slice(0, end - begin), slice(end - begin, length)
            assert batch["tokens"][row, own].tolist() == tokens.tokens[begin:end].tolist()
            assert batch["targets"][row, own].tolist() == tokens.tokens[begin + 1 : end + 1].tolist()
            assert batch["mask"][row, own].all() and not batch["mask"][row, rest].any()
            assert not batch["tokens"][row, rest].any() and len(set(batch["documents"][row, own].tolist())) <= 1
        halves = [stream.samples_at(2 * step + i, 1) for i in range(2)]
        for name, leaf in batch.items():
            assert torch.equal(torch.cat([half[name] for half in halves]), leaf)


def test_of_conversations_what_the_model_is_to_say_counts():
    rng = np.random.default_rng(0)
    tokens = hand_made(rng.integers(2, 9, 40), kind="chat", loss_mask=rng.integers(0, 2, 400).astype(np.uint8))
    stream, counted = BucketStream(tokens, (4, 8), batch=3), 0
    for step in range(stream.samples_per_epoch // 3):
        batch = stream.batch_at(step)
        counted += int(batch["mask"].sum())
        positions = stream.positions_at(3 * step, 3)
        assert all(tokens.loss_mask[n + 1] for n in positions[batch["mask"].numpy()])
    assert counted == sum(int(tokens.loss_mask[a + 1 : b].sum()) for a, b in zip(tokens.docs, tokens.docs[1:]))


# ---- meshes and resumes ----


def keys_of(batch):
    return list(zip(*(map(tuple, batch[name].tolist()) for name in ("tokens", "documents", "mask"))))


def in_order(parts, micro):
    """The rows of a batch from those of each data rank: micro-batch m, of `micro` rows, is one of rank m mod R."""
    pieces = [[part[i : i + micro] for i in range(0, len(part), micro)] for part in parts]
    return [row for m in range(len(pieces[0])) for piece in pieces for row in piece[m]]


def steps_on(config, path, size, steps):
    """Of each step the rows of all data ranks in the order of the batch, and the factor of its rate."""
    opened = [
        corpus.open_data(config, path, fake_mesh({"dp": size} if size > 1 else {}, rank))[0] for rank in range(size)
    ]
    found = []
    for step in steps:
        parts = [batch_at(count_samples(config, step)) for batch_at in opened]
        assert len({float(part["lr_scale"]) for part in parts}) == 1
        micro = config.train.micro_batch * config.data.seq_len // parts[0]["tokens"].shape[1]
        found.append((in_order([keys_of(part) for part in parts], micro), float(parts[0]["lr_scale"])))
    return found


TRANSFORMED = {"fim": 0.5, "token_weights": "97=0.5"}


@pytest.mark.parametrize(
    "own", [{}, pytest.param(TRANSFORMED, marks=pytest.mark.exhaustive)], ids=["plain", "rearranged"]
)
def test_meshes_and_resumes_read_what_one_process_reads(text, own):
    config = config_of(text, data=own)
    made = steps_on(config, text, 1, range(STEPS))
    stream = corpus.open_last(config, text)[0]
    assert {len(rows[0][0]) for rows, _ in made} == {4, 8, 16} and stream.samples_per_epoch < BATCH * STEPS
    sizes = [stream.size_at(BATCH * step) for step in range(STEPS)]
    assert [scale for _, scale in made] == [(size.sequences / BATCH) ** 0.5 for size in sizes] and len(set(sizes)) > 3
    rng, step = random.Random(1), 0
    while step < STEPS:  # each attempt begins at a checkpoint, before where the last one ended
        end = min(STEPS, step + rng.randint(1, 9))
        assert steps_on(config, text, rng.choice((1, 2, 4)), range(step, end)) == made[step:end]
        step = max(step + 1, end - 1) if end < STEPS else STEPS
    if not own:
        for step in range(STEPS):
            shown = [its.tokens[a:b].tolist() for _, its, of in rows_of(config, stream, BATCH * step) for a, b in of]
            rows = [[*tokens[: sum(number == 0 for number in of)]] for tokens, of, _ in made[step][0]]
            assert shown == rows[: len(shown)]


def test_rows_of_two_samples_are_rearranged_apart(text):
    """Their numbers are apart, although a sample has several rows: no two of a step draw the same."""
    config, seen = config_of(text, data=TRANSFORMED), []
    real = corpus.make_transforms

    def spied(c, path):
        def transformed(batch, first):
            seen.extend(range(first, first + len(batch["tokens"])))
            return real(c, path)(batch, first)

        return transformed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "make_transforms", spied)
        steps_on(config, text, 1, range(STEPS))
    assert len(seen) == len(set(seen)) > BATCH * STEPS


@pytest.mark.parametrize("mistake", ["epoch", "left"])
def test_a_planted_mistake_in_the_order_is_found(mistake, monkeypatch):
    """Documents in one order for all epochs, and those that a length leaves read from its begin."""
    real = BucketStream.documents_of

    def wrong(own, epoch, bucket, at):
        return (
            real(own, 0, bucket, at)
            if mistake == "epoch"
            else real(own, epoch, bucket, at % max(1, len(own.pieces[bucket])))
        )

    monkeypatch.setattr(BucketStream, "documents_of", wrong)
    with pytest.raises(AssertionError):
        test_every_document_comes_once_in_an_epoch_and_in_its_length(1)


# ---- steps ----


def trained(mesh, config, path, steps=6):
    """(the parameters, the rows, the data cursor) after some steps."""
    config = replace(config_table.from_json(config), mesh={axis.name: axis.size for axis in mesh.axes if axis.size > 1})
    job = build.build(config, mesh)
    state, rows = first_state(job), []
    batch_at = corpus.open_data(config, Path(path), mesh)[0]
    for step in range(steps):
        state, metrics = job.train_step(state, batch_at(int(state.data_cursor)))
        rows.append(metrics_row(job, metrics, step))
    return gather_on_first(state.params, build.specs_of(job).params, mesh), rows, int(state.data_cursor)


NUMBERS = ("loss", "grad_norm", "lr", "lr_scale", "num_tokens")
CASES = {
    "dp2": ({"dp": 2}, {}),
    "dp2, stage 3": ({"dp": 2}, {"zero": 3}),
    "rp2": ({"rp": 2}, {"zero": 1}),
    "tp2": ({"tp": 2}, {}),
    "pp2": ({"pp": 2}, {}),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c != "dp2, stage 3")) for c in CASES])
def test_steps_equal_one_process(text, case):
    sizes, own = CASES[case]
    config = to_json(config_of(text, by="tokens", **own))
    expected, log, _ = trained(fzero.one_process(), config, text)
    params, found, cursor = ranks.run(2, trained, config, str(text), mesh=sizes)[0]
    for row, want in zip(found, log, strict=True):
        assert_close([row[name] for name in NUMBERS], [want[name] for name in NUMBERS], rtol=1e-10, atol=1e-12)
    assert_close(params, expected, rtol=1e-10, atol=1e-10)
    assert cursor == 6 * BATCH and len({row["num_tokens"] for row in log}) > 3


@pytest.mark.parametrize("optim", ["sgd", "adamw", "muon"])
def test_a_step_is_as_long_as_its_rate_says(text, optim):
    base = {"name": optim, "clip": 0.0, "schedule": {"name": "constant", "warmup_steps": 0}}
    base |= {"lr_rest": 0.01} if optim == "muon" else {}
    plain, linear = (
        config_of(text, optim=base | {"lr_scaling": scaling, "lr_scaling_by": by})
        for scaling, by in (("none", "sequences"), ("linear", "tokens"))
    )
    start = first_state(build.build(plain, fzero.one_process())).params
    (one, *_), (other, (row,), _) = (trained(fzero.one_process(), to_json(c), text, 1) for c in (plain, linear))
    stream = corpus.open_last(linear, text)[0]
    scale = stream.size_at(0).tokens / (BATCH * 16)
    assert scale != 1 and row["lr_scale"] == scale and row["lr"] == pytest.approx(plain.optim.lr * scale)
    steps = [pytree.map(lambda new, old: new - old, params, start) for params in (one, other)]
    assert_close(steps[1], pytree.map(lambda x: x * scale, steps[0]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("own", [{"offload": "opt=host"}, {"train": {"ema_decay": 0.9}}], ids=["offloaded", "averaged"])
def test_the_factor_is_found_in_every_state(text, own):
    expected = trained(fzero.one_process(), to_json(config_of(text)), text, 4)
    found = trained(fzero.one_process(), to_json(config_of(text, **own)), text, 4)
    assert_close(found[0], expected[0], rtol=0.0, atol=0.0)
    assert [row["lr"] for row in found[1]] == [row["lr"] for row in expected[1]]


def test_factors_are_those_configured(text):
    size = Size(sequences=12, tokens=48)
    found = {
        (s, by): lr_scale(config_of(text, s, by), size) for s in ("linear", "sqrt") for by in ("sequences", "tokens")
    }
    assert found == {
        ("linear", "sequences"): 3.0,
        ("sqrt", "sequences"): 3.0**0.5,
        ("linear", "tokens"): 0.75,
        ("sqrt", "tokens"): 0.75**0.5,
    }


DISK = {"zero": 3, "offload": "params=nvme,opt=nvme"}  # whose steps are committed as they are made


@pytest.mark.slow
@pytest.mark.parametrize("own", [{}, DISK], ids=["in memory", "on a disk"])
def test_a_resumed_run_is_the_one_that_was_not_stopped(text, fz, tmp_path, monkeypatch, own):
    monkeypatch.chdir(tmp_path)
    train = {"checkpoint_every": 2, "eval_every": 4, "eval_batches": 2, "log_every": 4}
    Path("run.json").write_text(to_json(config_of(text, train=train, **own)))
    common = ("pretrain", "--config", "run.json", "--steps", "6", "--prompt", "")
    assert fz(*common, "--out", "whole")[0] == 0
    assert fz(*common, "--out", "parts", "--stop-at", "3")[0] == 0
    assert fz("pretrain", "--out", "parts", "--resume")[0] == 0
    whole, parts = (list(run_folder.read_metrics(Path(run))) for run in ("whole", "parts"))
    for one, other in zip(whole, parts, strict=True):
        for name in (*NUMBERS, "val_loss"):
            assert one.get(name) == other.get(name), (one["step"], name)
    assert len({row["lr_scale"] for row in whole}) > 2


@pytest.mark.slow
def test_conversations_are_tuned_in_rows_of_like_length(fz, tmp_path):
    chats.qwen3_folder(tmp_path / "qwen3")
    lines = [
        {"messages": [m[0], {**m[1], "content": m[1]["content"] * (1 + i % 3)}]} for i, m in enumerate(chats.sums())
    ]
    chats.write_lines(tmp_path / "chat.jsonl", lines)
    run = tmp_path / "run"
    own = ("--set", "data.packing=buckets", "--set", 'data.bucket_lengths="48,96"', "--set", "optim.lr_scaling=linear")
    start = ("finetune", "--init", tmp_path / "qwen3", "--data", tmp_path / "chat.jsonl", *chats.FLAGS, *own)
    code, out, err = fz(*start, "--steps", 12, "--out", run, "--prompt", "")
    assert (code, err) == (0, "") and "packing buckets: " in out
    config = run_folder.read_config(run)
    stream = corpus.open_last(config, run / "data")[0]
    sizes = [stream.size_at(4 * step).sequences for step in range(12)]
    assert chats.column(run, "lr_scale") == [size / 4 for size in sizes] and len(set(sizes)) > 1
    counted = [int(stream.batch_at(step)["mask"].sum()) for step in range(12)]
    assert chats.column(run, "num_tokens") == counted
    assert stream.samples_per_epoch <= 4 * 12 and chats.column(run, "loss")[-1] < chats.column(run, "loss")[0] - 0.4


# ---- what is refused ----

ERRORS = [
    ({"data": {"bucket_lengths": "4,x"}}, "data.bucket_lengths is '4,x'; it is lengths of rows, such as 64,128,256"),
    ({"data": {"bucket_lengths": "4,8"}}, "the lengths of rows are 4, 8; they must rise, each divide the last"),
    ({"data": {"bucket_lengths": "5,16"}}, "the lengths of rows are 5, 16"),
    ({"data": {"bucket_lengths": "8,4,16"}}, "the lengths of rows are 8, 4, 16"),
    ({"data": {"packing": "stream"}}, "data.bucket_lengths is '4,8,16' and data.packing is stream"),
    ({"data": {"packing": "stream", "bucket_lengths": ""}}, "optim.lr_scaling is 'sqrt' and data.packing is stream"),
    ({"data": {"mixture": "a:1,b:1", "path": "stdlib"}}, "data.mixture is given: a step reads one length of one"),
    ({"data": {"curriculum": "rarity", "curriculum_steps": 3}}, "data.curriculum is rarity"),
    ({"data": {"seq_len_warmup": "4:4:100"}}, "data.seq_len_warmup is 4:4:100: rows have lengths of their own"),
    ({"train": {"batch_ramp": "2:2:100"}}, "train.batch_ramp is 2:2:100: all batches have as many positions"),
    ({"stages": ["4: data.seq_len=8 model.max_len=1024"]}, "the run has stages"),
    ({"mesh": {"cp": 2}}, "mesh.cp=2: sequences are split over ranks"),
    (
        {"optim": {"lr_scaling": "root"}},
        "optim.lr_scaling is 'root' (did you mean sqrt?); it must be one of none, linear, sqrt",
    ),
    (
        {"optim": {"lr_scaling": "none", "lr_scaling_by": "tokens"}},
        "optim.lr_scaling_by is tokens and optim.lr_scaling",
    ),
    ({"optim": {"name": "onebit_adam"}}, "optim.name onebit_adam, which keeps its rate"),
    ({"train": {"update": "delayed"}}, "train.update is delayed"),
]


@pytest.mark.parametrize(("values", "message"), ERRORS, ids=lambda value: str(value)[:40])
def test_what_does_not_go_together_is_refused(values, message):
    with pytest.raises(ValueError) as error:
        config_of("corpus", **values)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_stage_in_buckets_is_refused_too():
    with pytest.raises(ValueError, match=r"stages has '4: data\.packing=buckets'; buckets are of a whole run"):
        from_table({"preset": "llama-tiny", "stages": ["4: data.packing=buckets"]})


def test_samples_of_two_batches_are_refused():
    stream = BucketStream(hand_made([5] * 30), (4, 8), batch=4)
    with pytest.raises(ValueError, match="samples of one batch of 4"):
        stream.samples_at(2, 4)
    for tokens, words in (
        (hand_made([1, 1]), "no document has two tokens"),
        (hand_made([4, 4], kind="pairs", loss_mask=np.ones(8, np.uint8)), "is a corpus of pairs; buckets are of text"),
    ):
        with pytest.raises(ValueError, match=words):
            BucketStream(tokens, (4, 8), batch=4)

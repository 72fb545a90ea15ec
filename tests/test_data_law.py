"""The data of step i is a pure function of (config, i), each row exactly once: by brute force over meshes, kills, a
batch that grows, weights that change, sources that end, and sequences that become longer."""

import itertools
import json
import math
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import ranks
from launched import rows, torchrun

from fzero import data
from fzero.data import Curriculum, mixed_stream
from fzero.run import config_table, from_table, to_json
from fzero.run.config import curriculum
from fzero.run.config.stages import count_samples, count_tokens, stage_of_step, stages_of
from fzero.run.setup import corpus
from fzero.sharding import fake_mesh

NAMES = ("web", "code", "math", "books", "news")
# Weights that change twice, one source that ends after 1.5 epochs, and one that ends after so many tokens.
MIXTURE = "web:0.4:0.1@700,code:0.3:0.5@1500,math:0.1:epochs=1.5,books:0.15:0@1500,news:0.05:0.2@700:tokens=150"
STEPS = 40


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("law")
    for name, count in zip(NAMES, (50, 30, 6, 24, 10)):
        texts = [f"{name} {i}: {i * i} is the square of {i}. " * (1 + i % 3) for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        data.prepare(folder / f"{name}.jsonl", folder / name, val_fraction=0.1)
    return folder


def config_of(home, **train):
    mixture = ",".join(f"{home}/{part}" for part in MIXTURE.split(","))
    return from_table(
        {
            "preset": "mlp-tiny",
            "data": {"mixture": mixture, "seq_len": 8},
            "train": {"steps": STEPS, "batch": 16, "micro_batch": 1, "batch_ramp": "4:4:300", **train},
        }
    )


def keys_of(batch):
    """A key for each row: its source, "" where there is one corpus, and its tokens, documents and mask."""
    if mixed_stream.SOURCES not in batch:
        return [
            ("", row) for row in zip(*(map(tuple, batch[name].tolist()) for name in ("tokens", "documents", "mask")))
        ]
    of = batch[mixed_stream.SOURCES].int().argmax(1).tolist()
    return [(NAMES[source], tuple(row)) for source, row in zip(of, batch["tokens"].tolist())]


def in_order(parts, micro):
    """The rows of a batch from those of each data rank: micro-batch m is one of rank m mod R."""
    pieces = [[part[i : i + micro] for i in range(0, len(part), micro)] for part in parts]
    return [row for m in range(len(pieces[0])) for piece in pieces for row in piece[m]]


def one_process(config, path):
    """The rows of all steps, read one after the other."""
    found = []
    for stage in stages_of(config):
        read, size = corpus.open_micro_batches(stage.config, path), stage.config.train.batch
        for step in range(stage.begin, stage.end):
            parts = [read(count_samples(config, step), m) for m in range(size // config.train.micro_batch)]
            found.append([key for part in parts for key in keys_of(part)])
    return found


def killed_and_resumed(config, path, rng):
    """The rows of each step, as attempts of a run read them that are killed at any step, go on from the checkpoint
    before, every third step, on another mesh; each reads what it reads anew."""
    found, saved = {}, {0: 0}  # saved: the cursor of each checkpoint
    while len(found) < STEPS:
        begin = max(saved)
        size, cursor, opened = rng.choice((1, 2, 4)), saved[begin], {}
        for step in range(begin, min(STEPS, begin + rng.randint(1, 9))):
            stage = stage_of_step(config, step)
            if stage.begin not in opened:
                opened[stage.begin] = [
                    corpus.open_data(stage.config, path, fake_mesh({"dp": size} if size > 1 else {}, rank))[0]
                    for rank in range(size)
                ]
            parts = [keys_of(batch_at(corpus.sample_of_cursor(cursor, []))) for batch_at in opened[stage.begin]]
            got = in_order(parts, stage.config.train.micro_batch)
            assert found.setdefault(step, got) == got
            cursor += sum(map(len, parts))
            if (step + 1) % 3 == 0:
                saved[step + 1] = cursor
            assert cursor == count_samples(config, step + 1)
        if len(found) == STEPS:
            break
    return [found[step] for step in range(STEPS)]


def expect_weights(config, path, made):
    """Every source has given what its weights add up to, up to two rows, and each of its rows equally often."""
    seq_len, own = config.data.seq_len, data.Mixture.parse(config.data.mixture)
    read = Counter(source for step in made for source, _ in step)
    stream = corpus.open_last(stages_of(config)[0].config, path)[0]
    total, ideal, given = sum(map(len, made)), [Fraction(0)] * 5, [0] * 5
    for row, (source, _) in enumerate(row for step in made for row in step):
        open_ = [stream.row_limit(i) is None or given[i] < stream.row_limit(i) for i in range(5)]
        weights = [one.token_weight(row * seq_len) * is_open for one, is_open in zip(own.sources, open_)]
        ideal = [x + w / sum(weights) for x, w in zip(ideal, weights)]
        given[NAMES.index(source)] += 1
        ended = [stream.row_limit(i) == given[i] for i in range(5)]
        ideal = [Fraction(g) if end else x for x, g, end in zip(ideal, given, ended)]
        assert max(abs(x - g) for x, g in zip(ideal, given)) < 3, row
    assert read == dict(zip(NAMES, stream.counts(total)))
    for i, name in enumerate(NAMES):
        rows_of_epoch = stream.streams[i].samples_per_epoch
        mine = Counter(row for step in made for source, row in step if source == name)
        whole = Counter(map(tuple, stream.streams[i].samples_at(0, rows_of_epoch)["tokens"].tolist()))
        for row, count in mine.items():
            times = whole[row]
            assert read[name] // rows_of_epoch * times <= count <= -(-read[name] // rows_of_epoch) * times
    assert read["math"] == stream.row_limit(2) and read["news"] == 150 // seq_len, "both have ended in this run"


@pytest.fixture
def mixed(home):
    config = config_of(home)
    path = home / "data"
    if not path.exists():
        corpus.find_corpus(config, home, print)
    return config, path


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 25))])
def test_any_kills_and_meshes_read_what_one_process_reads(mixed, seed):
    config, path = mixed
    made = one_process(config, path)
    assert [len(rows) for rows in made] == [stage_of_step(config, step).config.train.batch for step in range(STEPS)]
    assert sorted({len(rows) for rows in made}) == [4, 8, 12, 16] and count_tokens(config, STEPS) > 2000
    assert killed_and_resumed(config, path, random.Random(seed)) == made
    if not seed:
        expect_weights(config, path, made)


@pytest.mark.exhaustive
@pytest.mark.parametrize("packing", ["stream", "best-fit"])
@pytest.mark.parametrize("seed", range(4))
def test_and_so_with_sequences_that_become_longer(mixed, seed, packing):
    config, path = mixed
    longer = replace(
        config,
        data=replace(config.data, seq_len=12, packing=packing),
        stages=("17: data.seq_len=8",),
    )
    made = one_process(longer, path)
    assert [len(rows[0][1]) for rows in made] == [8] * 17 + [12] * 23
    assert killed_and_resumed(longer, path, random.Random(seed)) == made
    if packing == "stream":
        return
    # Of a source that is read less than once no token comes twice.
    stream = corpus.open_last(stages_of(longer)[0].config, path)[0]
    assert stream.counts(sum(len(rows) for rows in made[:17]))[0] < stream.streams[0].samples_per_epoch


@pytest.fixture
def with_middles(mixed):
    config, path = mixed
    return replace(config, data=replace(config.data, fim=0.7)), path


def test_and_so_with_middles_to_fill_in(mixed, with_middles):
    config, path = with_middles
    made = one_process(config, path)
    assert killed_and_resumed(config, path, random.Random(0)) == made
    pairs = [pair for old, new in zip(one_process(*mixed), made) for pair in zip(old, new, strict=True)]
    assert [old[0] for old, _ in pairs] == [new[0] for _, new in pairs]
    changed = [new[1] for old, new in pairs if old != new]
    assert all({253, 254, 255} <= {*row} for row in changed) and 0.3 < len(changed) / len(pairs) < 0.8


@pytest.fixture
def without_spans(home):
    """A config of one corpus that takes spans out, in which a space counts half as much as other bytes, an e not at
    all."""
    config = config_of(home, batch=8)
    own = {"path": str(home / "web"), "span_corruption": 0.7, "token_weights": "32=0.5,101=0"}
    return replace(config, data=replace(config.data, mixture="", **own)), home / "web"


def test_and_so_with_spans_taken_out_and_weights_of_tokens(without_spans):
    config, path = without_spans
    made = one_process(config, path)
    assert killed_and_resumed(config, path, random.Random(0)) == made
    plain = one_process(replace(config, data=replace(config.data, span_corruption=0.0, token_weights="")), path)
    seen = Counter()
    for new, old in zip(itertools.chain(*made), itertools.chain(*plain), strict=True):
        (tokens, of, mask), (text, *_, counts) = new[1], old[1]
        seen[tokens == text] += 1
        assert tokens == text or {192, 193} <= {*tokens}
        for target, one, other, count, was in zip(tokens[1:], of, of[1:], mask, counts):
            if one == other and was and tokens == text:
                seen[target, count] += 1
            assert not (count and one == other and target == 101)
    assert 0.3 < seen[False] / (seen[True] + seen[False]) < 0.8 and seen[101, 0.0] and seen[32, 0.5]
    assert {key[1] for key in seen if isinstance(key, tuple) and key[0] not in (32, 101)} == {1.0}
    assert not {(32, 0.0), (32, 1.0), (101, 1.0)} & set(seen)


@pytest.mark.parametrize("of", ["with_middles", pytest.param("without_spans", marks=pytest.mark.exhaustive)])
def test_rows_that_are_changed_by_their_place_in_a_batch_are_found(of, request, monkeypatch):
    config, path = request.getfixturevalue(of)
    made, real = one_process(config, path), corpus.make_transforms
    monkeypatch.setattr(corpus, "make_transforms", lambda c, p: lambda batch, first: real(c, p)(batch, first % 4))
    assert one_process(config, path) != made


@pytest.fixture
def in_order_of_length(home):
    """A config whose batch grows while its rows become harder and its pieces longer, over two epochs."""
    values = {"schedule": "root:2", "start": 0.2, "steps": 30}
    if not (home / "web" / "analysis-length-8-stream").exists():
        data.analyze(home / "web", "length", seq_len=8)
    config = config_of(home)
    own = {f"curriculum_{key}": value for key, value in values.items()}
    return replace(
        config,
        data=replace(
            config.data, mixture="", path=str(home / "web"), curriculum="length", seq_len_warmup="2:2:600", **own
        ),
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 9))])
def test_and_so_with_a_curriculum(home, in_order_of_length, seed):
    config, path = in_order_of_length, home / "web"
    made = one_process(config, path)
    assert sorted({len(rows) for rows in made}) == [4, 8, 12, 16]
    assert killed_and_resumed(config, path, random.Random(seed)) == made
    # Each row once in an epoch, and at each step rows of the allowed part, or the easiest that are left.
    values = data.analyze(home / "web", "length", seq_len=8, name=f"again-{seed}")
    stream = data.TokenStream(data.open_tokens(path), 8, 1)
    of = {tuple(row): n for n, row in enumerate(stream.rows.positions(np.arange(len(stream.rows))).tolist())}
    last, _ = corpus.open_last(stages_of(config)[-1].config, path)
    size, order = stream.samples_per_epoch, sorted(range(len(values)), key=lambda n: (values[n], n))
    total = sum(map(len, made))
    drawn = [of[tuple(row)] for row in last.positions_at(0, total).tolist()]
    assert size < total and sorted(drawn[:size]) == list(range(size)) and len(set(drawn[size:])) == total - size
    least, first = math.ceil(Fraction("0.2") * size), 0
    for step, own in enumerate(made):
        wanted = (x for x in range(size) if (x / (size - least)) ** 2 >= step / 30 - 1e-12)
        allowed = size if step >= 30 else least + next(wanted)
        for n in range(first, first + len(own)):
            assert order.index(drawn[n]) < max(allowed, n % size + 1), (step, n)
        lengths = [documents.count(number) for _, (_, documents, _) in own for number in set(documents)]
        assert max(lengths) <= min(8, 2 + first * 8 // 600 * 2), step
        first += len(own)


@pytest.mark.exhaustive
@pytest.mark.parametrize("of", ["step", "sample"])
def test_a_planted_mistake_in_a_curriculum_is_found(home, in_order_of_length, monkeypatch, of):
    """A curriculum that counts from where a process began, and one that draws rows anew."""
    config, path = in_order_of_length, home / "web"
    made = one_process(config, path)
    real = curriculum.pieces_of
    if of == "step":
        monkeypatch.setattr(curriculum, "pieces_of", lambda c, by_tokens: real(c, by_tokens)[-1:])
    else:
        monkeypatch.setattr(Curriculum, "numbers", lambda own, seed, epoch, begin, end: own.ranked[: end - begin])
    with pytest.raises((AssertionError, ValueError)):
        assert killed_and_resumed(config, path, random.Random(0)) == made


def rows_on(mesh, text, path, steps):
    """Of each of these steps the rows of this rank's micro-batches."""
    config, found = config_table.from_json(text), []
    for step in steps:
        stage = stage_of_step(config, step)
        batch_at = corpus.open_data(stage.config, path, mesh)[0]
        found.append(keys_of(batch_at(count_samples(config, step))))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_ranks_of_processes_have_the_rows_of_one(mixed, sizes):
    config, path = mixed
    made, steps = one_process(config, path), [0, 3, 9, 20, 39]
    count = 2 if sizes == {"dp": 2} else 4
    got = ranks.run(count, rows_on, to_json(config), path, steps, mesh=sizes)
    data_ranks = {"{'dp': 4}": (0, 1, 2, 3), "{'dp': 2, 'tp': 2}": (0, 2)}.get(str(sizes), (0, 1))
    of_data = [got[i] for i in data_ranks]
    for i, step in enumerate(steps):
        assert in_order([rank[i] for rank in of_data], 1) == made[step]


@pytest.mark.exhaustive
def test_a_run_that_moves_to_other_meshes_trains_as_one_process(home, fz, monkeypatch):
    """Through checkpoints and torchrun, with canonical sums: the bits of the parameters after each step, its loss and
    the losses and rows of its sources."""
    monkeypatch.chdir(home)
    run = [
        *("--model", "mlp-tiny", "--steps", 14, "--batch", 16, "--batch-ramp", "4:4:150", "--micro-batch", 1),
        *("--seq-len", 8, "--mixture", MIXTURE, "--reduce", "canonical", "--precision", "fp32", "--peak-tflops", 1),
        *("--set", "train.compiled=false", "--set", "precision.fp32_matmul=default", "--set", "train.digest_every=1"),
        *("--set", "train.checkpoint_every=3", "--set", "train.eval_every=7", "--prompt", ""),
    ]
    assert fz("pretrain", *run, "--out", "alone")[0] == 0
    assert fz("pretrain", *run, "--out", "moved", "--stop-at", 4)[0] == 0
    for count, stop in ((2, 6), (4, 11)):
        mesh = ("--mesh", f"dp={count}", "--stop-at", stop, "--prompt", "")
        torchrun(home, count, "--out", "moved", "--resume", *mesh)
    assert fz("pretrain", "--out", "moved", "--resume", "--mesh", "dp=1", "--prompt", "")[0] == 0
    names = ("step", "loss", "digest", "loss_by_source", "rows_by_source", "tokens", "lr", "val_loss_by_source")
    alone, moved = ([{n: row.get(n) for n in names} for row in rows(home / run)] for run in ("alone", "moved"))
    assert alone == moved and len({row["tokens"] for row in alone}) == 14


@pytest.mark.exhaustive
def test_a_planted_mistake_is_found(mixed, monkeypatch):
    """A reader that goes on from the step in place of the samples reads other rows."""
    config, path = mixed
    made = one_process(config, path)
    monkeypatch.setattr(corpus, "sample_of_cursor", lambda cursor, skips: cursor // 16 * 16)
    with pytest.raises(AssertionError):
        assert killed_and_resumed(config, path, random.Random(0)) == made

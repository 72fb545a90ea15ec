"""Mixtures of corpora: which row is of which source, in what order, and what a run on one says of them."""

import itertools
import json
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import ranks
import torch

import fzero
from fzero import data, models
from fzero.core import prng
from fzero.data import MixedStream, Mixture, Tokens, mixed_stream, sources_of, write_mixture
from fzero.run import config_table, from_table
from fzero.run.setup import corpus

TINY = (
    *("--model", "mlp-tiny", "--batch", 4, "--micro-batch", 2, "--seq-len", 16, "--steps", 6),
    *("--precision", "fp32", "--peak-tflops", 1, "--prompt", "", "--set", "train.compiled=false"),
    *("--set", "precision.fp32_matmul=default", "--set", "train.eval_batches=2", "--set", "train.checkpoint_every=3"),
    *("--set", "train.eval_every=3", "--set", "train.digest_every=1"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    for name, count in (("web", 60), ("code", 20), ("math", 9)):
        texts = [f"{name} {i}: {i * i} is the square of {i}. " * (1 + i % 4) for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        data.prepare(folder / f"{name}.jsonl", folder / name, val_fraction=0.1)
    return folder


@pytest.fixture
def here(home, monkeypatch):
    monkeypatch.chdir(home)
    return home


# -- which source a row is of


def drawn(weights, rng):
    kind = rng.randrange(3)
    if kind == 0:
        found = [Fraction(rng.randint(0, 3)) for _ in range(weights)]
    elif kind == 1:
        found = [Fraction(rng.randint(0, 1000), 1000) for _ in range(weights)]
    else:
        found = [Fraction(1, 2 ** rng.randint(0, 8)) for _ in range(weights)]
    return found if sum(found) else [Fraction(1)] * weights


def walk(periods, most, rows):
    """Each row's source, found one by one, and the largest deviation from the sum of the weights so far; asserts that
    the closed forms say the same of every row."""
    stretches, given, owed = mixed_stream.mixture_segments(periods, most), [0] * len(most), [Fraction(0)] * len(most)
    sources, worst = [], Fraction(0)
    for row in range(rows):
        stretch = [one for one in stretches if one.begin <= row][-1]
        left = [m is None or g < m for m, g in zip(most, given)]
        weights = [w if rest else Fraction(0) for w, rest in zip([p for p in periods if p[0] <= row][-1][1], left)]
        assert stretch.counts(row) == given
        if stretch.tree is None:
            assert not sum(weights)
            break
        source, before = mixed_stream.source_of(stretch.tree, row - stretch.begin)
        assert stretch.start_counts[source] + before == given[source] and weights[source] > 0
        sources.append(source)
        given[source] += 1
        for i, weight in enumerate(weights):
            owed[i] += weight / sum(weights) - (i == source)
            if most[i] is not None and given[i] == most[i]:
                owed[i] = Fraction(0)
        worst = max(worst, *map(abs, owed)) if all(m is None for m in most) else worst
    return sources, worst


@pytest.mark.parametrize("cases", [8, pytest.param(400, marks=pytest.mark.exhaustive)])
def test_each_row_has_one_source_and_no_source_is_two_rows_from_its_weight(cases):
    rng = random.Random(5)
    worst = []
    for _ in range(cases):
        count = rng.randint(2, 12)
        begins = [0, *itertools.accumulate(rng.randint(1, 60) for _ in range(rng.randint(0, 3)))]
        periods = [(begin, drawn(count, rng)) for begin in begins]
        worst.append(walk(periods, [None] * count, 150)[1])
    assert max(worst) < 2 and max(worst) > Fraction(1, 2)


def test_a_used_up_source_leaves_its_weight_to_the_others():
    rng = random.Random(7)
    for _ in range(10):
        count = rng.randint(2, 6)
        most = [rng.randint(0, 25) if rng.random() < 0.6 else None for _ in range(count)]
        periods = [(0, drawn(count, rng)), (rng.randint(1, 40), drawn(count, rng))]
        sources, _ = walk(periods, most, 120)
        assert all(m is None or Counter(sources)[i] <= m for i, m in enumerate(most))
    assert walk([(0, [Fraction(1), Fraction(1)])], [3, 5], 20)[0].count(1) == 5  # and then the mixture ends


def test_a_row_far_away_costs_what_the_first_does():
    tree = mixed_stream.tree_of([Fraction(7, 10), Fraction(2, 10), Fraction(1, 10)], [Fraction(0)] * 3)
    row = 10**15
    assert mixed_stream.counts_of(tree, row, 3) == [7 * 10**14, 2 * 10**14, 10**14]
    assert sum(mixed_stream.source_of(tree, row + i)[0] == 0 for i in range(100)) == 70


# -- the text of a mixture

TEXTS = {
    "x": "mixture has 'x' without a weight; a source is NAME=PATH:WEIGHT",
    ":1": "mixture has ':1' without a path",
    "a:0,b:0": "the weights of a, b sum to 0 from token 0 on; give one of them a weight above 0",
    "a:1:0@500,b:0": "the weights of a, b sum to 0 from token 500 on",
    "a:-1,b:2": "the weight of a is -1; it must be at least 0 and below 1e12",
    "a:1,./a:2": "mixture: ./a is named twice; give it once",
    "a/x:1,b/x:2": "a/x and b/x are both named 'x'; give them names: one=a/x:..., two=b/x:...",
    "a:1:2@5:0@3": "a has 0@3; its weight comes first, and others after it with rising tokens",
    "a:0.5@7": "a has 0.5@7; its weight comes first",
    "a:1:epochs=0": "a has epochs=0; it must be a number above 0",
    "a:1:epochs=x": "'epochs=x' has no number",
    "a:1:epochs=1:epochs=2": "a has epochs twice; give it once",
    "a:1:tokens=1.5": "a has tokens=1.5; it must be a whole number above 0",
    "a:1/0": "'1/0' has no number",
    "a:1@2.5": "a has 1@2.5; a weight begins at a whole number of tokens",
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_is_no_mixture_is_one_line(text):
    with pytest.raises(ValueError) as caught:
        Mixture.parse(text)
    assert TEXTS[text] in str(caught.value) and "\n" not in str(caught.value)


def test_a_mixture_is_printed_as_it_is_read():
    text = "w=s3://bucket:80/web:1/3,code/b:0.25:0@1000000:epochs=1.5:tokens=9"
    mixture = Mixture.parse(text)
    assert str(mixture) == text and mixture.names == ("w", "b")
    assert mixture.sources[0].path == "s3://bucket:80/web" and mixture.sources[0].weights == ((0, Fraction(1, 3)),)
    assert Mixture.parse(str(mixture.absolute())).sources[1].path.startswith("/")


# -- the rows


def streams(*sizes, seq_len=4, seed=3, packing="stream"):
    """A stream of each corpus of so many rows; token n of corpus i is n."""
    found = []
    for i, size in enumerate(sizes):
        docs = np.arange(0, size * seq_len + 2, 1 + size * seq_len)
        tokens = Tokens(f"{i}", np.arange(size * seq_len + 1, dtype=np.uint16), docs, 1 << 16, 0)
        found.append(data.TokenStream(tokens, seq_len, 1, seed, packing))
    return tuple(found)


def test_each_source_is_read_in_its_own_order_row_by_row():
    mixed = MixedStream(Mixture.parse("a:0.5,b:0.3,c:0.2"), streams(7, 50, 3), batch=8)
    batches = [mixed.batch_at(step) for step in range(20)]
    of = torch.cat([batch[mixed_stream.SOURCES] for batch in batches]).int().argmax(1)
    rows = torch.cat([batch["tokens"] for batch in batches])
    for i, stream in enumerate(mixed.streams):
        count = int((of == i).sum())
        assert torch.equal(rows[of == i], stream.samples_at(0, count)["tokens"]), "its epochs, one after the other"
        assert mixed.counts(160)[i] == count
    again = torch.cat([mixed.samples_at(first, 5)["tokens"] for first in range(0, 160, 5)])
    assert torch.equal(again, rows), "however the rows are cut into batches"


def test_epochs_and_tokens_end_a_source_and_the_mixture():
    mixed = MixedStream(Mixture.parse("a:1:epochs=2,b:1:tokens=13"), streams(5, 50), batch=4)
    assert mixed.counts(13) == [10, 3] and mixed.rows == 13
    a = mixed.samples_at(0, 13)["tokens"][mixed.samples_at(0, 13)[mixed_stream.SOURCES][:, 0]]
    assert sorted(Counter(a[:, 0].tolist()).values()) == [2] * 5, "each row of it twice"
    with pytest.raises(ValueError, match=r"the mixture has 13 rows of 4 tokens, .* row 14 is asked"):
        mixed.samples_at(12, 2)


def test_weights_change_at_a_token_of_the_run():
    mixed = MixedStream(Mixture.parse("a:1:0@41,b:0:1@41"), streams(90, 90), batch=4)
    assert mixed.counts(11) == [11, 0] and mixed.counts(31) == [11, 20], "from the first row that begins at 41 or later"


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
def test_longer_rows_read_what_is_left_of_each_source(packing):
    text = "a:1:3@200,b:1:epochs=1"
    short = MixedStream(Mixture.parse(text), streams(64, 32, packing=packing), batch=4)
    rest = short.remainder_after(40)
    assert rest.tokens == 160 and rest.read == (80, 80)
    long = MixedStream(
        Mixture.parse(text),
        tuple(
            data.TokenStream(one.tokens, 8, 1, one.seed, packing, its)
            for one, its in zip(short.streams, rest.remainders)
        ),
        batch=2,
        remainder=rest,
    )
    left = [32 * 4 - 80, 64 * 4 - 80]
    assert long.counts(5)[0] in (2, 3) and long.counts(9)[0] >= 5  # 1 : 1 until token 200, which is row 5
    assert long.segments[1].begin == 5
    read = torch.cat([short.samples_at(0, 40)["tokens"].flatten(), long.samples_at(0, 8)["tokens"].flatten()])
    assert len(read) == 160 + 64
    of_b = long.row_limit(1)
    assert of_b is not None and of_b * 8 >= left[0] - 7
    tokens = long.streams[1].samples_at(0, of_b)
    before = short.streams[1].samples_at(0, short.counts(40)[1])
    seen = Counter(before["tokens"].flatten().tolist()) + Counter(tokens["tokens"][tokens["mask"]].tolist())
    assert max(seen.values()) == 1, "no token of it twice in the epoch"


def test_a_limit_in_tokens_counts_what_shorter_rows_have_read():
    text = "a:1:tokens=112,b:1"
    short = MixedStream(Mixture.parse(text), streams(64, 64), batch=4)
    rest = short.remainder_after(40)
    assert rest.read == (80, 80)
    rows = tuple(
        data.TokenStream(one.tokens, 8, 1, one.seed, remainder=its) for one, its in zip(short.streams, rest.remainders)
    )
    long = MixedStream(Mixture.parse(text), rows, batch=2, remainder=rest)
    assert long.row_limit(0) == (112 - 80) // 8 and long.counts(100)[0] == 4


def test_evaluations_take_equally_many_rows_of_each_source():
    mixed = MixedStream(Mixture.parse("a:0.99,b:0.01,c:0"), streams(7, 50, 2), batch=4)
    batches = list(mixed.eval_batches(12))
    real = torch.cat([batch[mixed_stream.SOURCES][batch["mask"].any(1)] for batch in batches])
    assert real.sum(0).tolist() == [5, 5, 2]
    halves = [list(mixed.eval_batches(12, (k, 2))) for k in range(2)]
    assert sum(int(batch["mask"].sum()) for half in halves for batch in half) == sum(
        int(batch["mask"].sum()) for batch in batches
    )
    assert sum(int(batch["mask"].any(1).sum()) for batch in mixed.eval_batches()) == 59


# -- the losses of sources


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek"])
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_the_losses_of_sources_are_those_of_their_rows_alone(family, impl):
    model = models.build(from_table({"preset": f"{family}-tiny", "model": {"n_layers": 2, "d_model": 16}}).model)
    params, ctx = models.init_params(model, prng.key(0)), models.Ctx()
    ctx = ctx._replace(kernels=ctx.kernels.parse(f"auto,linear_cross_entropy={impl}"))
    rows = torch.randint(0, 32, (5, 9))
    batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "mask": torch.rand(5, 8) < 0.7}
    of = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 1, 0], [1, 0, 0]], dtype=torch.bool)
    plain = models.loss(model, params, batch, ctx)
    marked = models.loss(model, params, {**batch, mixed_stream.SOURCES: of}, ctx)
    assert torch.equal(plain.total, marked.total)
    for i in range(3):
        part = {name: leaf[of[:, i]] for name, leaf in batch.items()}
        alone = models.loss(model, params, part, ctx) if len(part["tokens"]) else None
        total = 0.0 if alone is None else float(alone.extra.get("cross_entropy", alone.total))
        assert float(marked.extra[f"source_loss/{i}"]) == pytest.approx(total, rel=1e-5)
        assert int(marked.extra[f"source_tokens/{i}"]) == int(part["mask"].sum())


# -- runs

MIXED = "web:0.6,code:0.4:0.1@200,math:0.2:epochs=1"


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def trained(fz, here):
    """A run of 6 steps of 4 x 16 tokens on three corpora."""
    if not (here / "run").is_dir():
        code, out, err = fz("pretrain", *TINY, "--mixture", MIXED, "--out", "run")
        assert code == 0, err
        assert "mixture from token 200 on: web 0.6667, code 0.1111, math 0.2222" in out
    return here / "run"


def test_a_run_tells_rows_and_losses_by_source(trained):
    rows = metrics(trained)
    mixed = corpus.open_last(run_config(trained), trained / "data")[0]
    for row in rows:
        of = mixed.batch_at(row["step"] - 1)[mixed_stream.SOURCES].sum(0).tolist()
        assert row["rows_by_source"] == dict(zip(("web", "code", "math"), of))
        assert set(row["loss_by_source"]) == {name for name, count in row["rows_by_source"].items() if count}
        low, high = min(row["loss_by_source"].values()), max(row["loss_by_source"].values())
        assert low - 1e-5 <= row["loss"] <= high + 1e-5
    assert set(rows[-1]["val_loss_by_source"]) == {"web", "code", "math"}
    assert mixed.counts(12) == [6, 4, 2] and mixed.counts(24)[1] < 7


def run_config(run):
    return config_table.from_json((run / "config.json").read_text())


def test_show_has_the_documents_of_any_step(trained, fz):
    code, out, _ = fz("data", "show", trained, "--step", 5)
    assert code == 0
    mixed = corpus.open_last(run_config(trained), trained / "data")[0]
    batch, tokenizer = mixed.batch_at(4), data.load_tokenizer(trained / "data")
    for row in range(4):
        lines = [line for line in out.splitlines() if line.startswith(f"row {row}  ")]
        source = mixed.mixture.names[int(batch[mixed_stream.SOURCES][row].int().argmax())]
        assert all(f"  {source}  document " in line for line in lines)
        assert len(lines) == int(batch["documents"][row].max()) + 1
        begin = tokenizer.decode(batch["tokens"][row][batch["documents"][row] == 0].tolist())
        assert lines[0].endswith(repr(begin[:16]))
    code, _, err = fz("data", "show", trained, "--step", 7)
    assert code == 2 and "--step is 7; the run has the steps 1 to 6" in err


@pytest.mark.exhaustive  # test_data_law.py resumes at any step
def test_a_run_that_is_resumed_and_replayed_has_the_same_rows(trained, fz, here):
    assert fz("pretrain", *TINY, "--mixture", MIXED, "--out", "halves", "--stop-at", 3)[0] == 0
    code, _, err = fz("pretrain", *TINY, "--mixture", MIXED, "--out", "halves", "--auto-resume")
    assert code == 0, err
    names = ("loss", "loss_by_source", "rows_by_source", "digest")
    assert [[row[n] for n in names] for row in metrics(here / "halves")] == [
        [row[n] for n in names] for row in metrics(trained)
    ]
    code, out, _ = fz("replay", "halves", "--step", 6)
    assert code == 0 and "loss_by_source" not in out
    code, _, err = fz("pretrain", *TINY, "--mixture", "web:1,code:1", "--out", "halves", "--auto-resume")
    assert code == 2 and "data.mixture is" in err


def test_runs_that_cannot_be_are_one_line_and_leave_nothing(fz, here, tmp_path):
    data.prepare(here / "web.jsonl", tmp_path / "bpe", tokenizer="bpe:280", val_fraction=0.1)
    (tmp_path / "mixed").mkdir()
    write_mixture(Mixture.parse("web:1,code:1"), tmp_path / "mixed" / "it")
    cases = {
        f"web:1,{tmp_path}/bpe:1": f"{tmp_path}/bpe has tokens of another tokenizer (bpe:280) than",
        "web:1,gone:1": "gone/meta.json: no such file",
        "web:1:epochs=0.001,code:1:tokens=64": "its sources have 4 rows of 16 tokens within their epochs and tokens, "
        "and the run takes 24",
        f"web:1,it={tmp_path}/mixed/it:1": "is a mixture itself; a mixture is of corpora of text",
        "web:-1,code:1": "the weight of web is -1",
    }
    for text, words in cases.items():
        code, _, err = fz("pretrain", *TINY, "--mixture", text, "--out", "bad")
        assert code == 2 and words in err and len(err.strip().splitlines()) == 1, err
        assert not (here / "bad").exists()
    code, _, err = fz("pretrain", *TINY, "--mixture", "web:1,code:1", "--data", "web", "--out", "bad")
    assert code == 2 and "a mixture names its own corpora, of text; leave one of them out" in err


def test_a_corpus_that_has_changed_is_named(trained, fz, here):
    meta = here / "code" / "meta.json"
    text = meta.read_text()
    meta.write_text(text.replace('"seed": 0', '"seed": 1'))
    try:
        for command in (("pretrain", "--resume", "--out", trained), ("data", "show", trained, "--step", 1)):
            code, _, err = fz(*command)
            assert code == 2 and "code: has changed since the run began, whose mixture has it as code; put that" in err
        with pytest.raises(ValueError, match="has changed since the run began"):
            sources_of(trained / "data")
    finally:
        meta.write_text(text)


# -- the losses of sources on meshes


def train_marked(mesh, family, micro_batches, options):
    """The metrics of two steps on rows of three sources."""
    table = {"preset": f"{family}-tiny", "model": SMALL[family], "data": {"seq_len": 16}}
    model = models.build(from_table(table).model)
    tx = fzero.optim.sgd(0.1)
    plan = fzero.zero_plan(options.get("zero", 0), model, mesh, policy=fzero.fp64(), **PLANS.get(options["kind"], {}))
    state = fzero.init_state(model, tx, plan, seed=3)
    step = fzero.make_train_step(model, tx, plan, micro_batches=micro_batches)
    rng, found = torch.Generator().manual_seed(5), []
    for _ in range(2):
        rows = torch.randint(0, 32, (8, 17), generator=rng)
        batch = {
            "tokens": rows[:, :-1],
            "targets": rows[:, 1:],
            "mask": torch.rand(8, 16, generator=rng) < 0.7,
            mixed_stream.SOURCES: torch.eye(3, dtype=torch.bool)[torch.randint(0, 2, (8,), generator=rng)],
        }
        state, metrics = step(state, fzero.local_batch(batch, mesh, micro_batches))
        found.append({name: float(value) for name, value in metrics.extra.items() if name.startswith("source")})
        found[-1]["loss"] = float(metrics.loss)
    return found


SIZES = {"n_layers": 2, "d_model": 16, "n_heads": 2, "n_kv_heads": 2, "d_ff": 24, "vocab_size": 32, "max_len": 16}
SMALL = {"llama": SIZES, "mixtral": SIZES}
PLANS = {"canonical": {"reduce": "canonical"}, "once": {"reduce": "once"}}
ON_MESHES = (
    ({"dp": 2}, 2, {"kind": "canonical", "zero": 3}),
    ({"tp": 2}, 2, {"kind": "", "zero": 0}),
    ({"cp": 2}, 2, {"kind": "", "zero": 1}),
    ({"pp": 2}, 2, {"kind": "", "zero": 0}),
    ({"dp": 2, "tp": 2}, 2, {"kind": "once", "zero": 2}),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize(("sizes", "micro", "options"), ON_MESHES, ids=str)
def test_meshes_add_up_the_losses_of_one_process(sizes, micro, options, family):
    wanted = train_marked(fzero.one_process(), family, 4, {"kind": ""})
    count = 4 if len(sizes) == 2 else 2
    for got in ranks.run(count, train_marked, family, micro if "dp" in sizes else 4, options, mesh=sizes):
        for mine, its in zip(got, wanted):
            assert mine.keys() == its.keys() and len(mine) == 7
            assert mine == pytest.approx(its, rel=1e-9)
            assert mine["source_tokens/2"] == 0

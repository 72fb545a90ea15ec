"""The search: candidates, their closed forms beside exact traces, the reasons, and the config that it writes."""

import json
from concurrent.futures import Executor, Future
from types import SimpleNamespace

import pytest
from test_plan import FLAGS
from test_plan import SMALL as PLANNED

import fzero
from fzero.cli import main
from fzero.planner import closed_forms, closed_layer, devices, estimate, search, search_result
from fzero.planner.estimate import Candidate
from fzero.run import LayerBytes, build, config_table, machine, run_folder

H100 = devices.device("h100")
# Without what a search decides.
SMALL = {**PLANNED, "train": {name: x for name, x in PLANNED["train"].items() if name not in ("micro_batch", "remat")}}


@pytest.fixture(scope="module")
def found():
    return fzero.search(SMALL, 4, choices={"train.remat": ("none", "full"), "offload": ("",)}, top=3)


def test_the_best_are_in_order_and_exact(found):
    seconds = [f.report.step_s for f in found.best]
    assert seconds == sorted(seconds) and len(seconds) == 3 and found.best[0].reason == ""
    for f in found.best:
        again = fzero.plan(f.candidate.apply_to(config_table.from_table(SMALL)), f.candidate.mesh)
        assert (again.step_s, again.peak_bytes_per_rank) == (f.report.step_s, f.report.peak_bytes_per_rank)
        assert f.report.ranks == 4 and f.report.fits
    assert all("slower" in f.reason or f.reason == "as fast" for f in found.best[1:])


@pytest.mark.parametrize(
    "sizes",
    (pytest.param((1, 2), marks=pytest.mark.exhaustive), pytest.param((2,), marks=pytest.mark.slow)),
    ids=("any mesh", "with pp"),
)
def test_the_best_is_that_of_all_candidates_traced(sizes):
    """Though few are traced, and of those with pp two."""
    tried = {"train.remat": ("none",), "offload": ("",), "zero": (0, 3), "train.micro_batch": (1, 2), "mesh.pp": sizes}
    config = machine.resolve_auto(config_table.from_table(SMALL), H100.target)
    every = list(estimate.candidates(config, 4, H100.on_node(4), tried))
    found = fzero.search(SMALL, 4, choices=tried, top=1)
    seconds = {c: search.trace_candidate(config, c, H100).step_s for c in every}
    best = min(seconds, key=lambda c: seconds[c])
    assert found.traced < len(every) and found.best[0].report.step_s == seconds[best]
    assert found.best[0].candidate == best
    again = fzero.plan(best.apply_to(config_table.from_table(SMALL)), best.mesh)
    assert (again.step_s, again.peak_bytes_per_rank) == (seconds[best], found.best[0].report.peak_bytes_per_rank)


def test_each_class_of_losers_has_a_reason(found):
    mine = set(search_result.choices(found.best[0].candidate).values())
    said = {loser.choice for loser in found.losers}
    assert not mine & said
    assert {"stage 0", "stage 1", "stage 2", "stage 3", "remat full", "tp=2", "tp=4"} <= mine | said
    assert all(loser.reason and loser.count for loser in found.losers)
    table = json.loads(found.to_json())
    assert len(table["best"]) == 3 and table["considered"] == found.considered and table["best"][0]["plan"]["fits"]
    page = str(found)
    assert "the fastest" in page and "why the others lose" in page and "tp=2" in page


class Told(Executor):
    """In place of traces: reports that are given, and in which order they were asked for."""

    def __init__(self, reports):
        self.reports, self.asked = reports, []

    def submit(self, f, config, c, device):
        self.asked.append(c)
        future = Future()
        future.set_result(self.reports(c))
        return future


def reported(step_s, fits=True, **more):
    time = {"phases": {"forward": step_s, "update": 0.0}, "exposed": {}, "waiting": {}}
    return SimpleNamespace(step_s=step_s, fits=fits, peak_bytes_per_rank=10**9, flop_per_step=100, time=time | more)


def sketched(*expected, tp=1):
    """Sketches of so many candidates of one kind, in the order of their seconds."""
    return [
        closed_forms.Sketch(Candidate(8, i + 1, tp, 3, "none", "", 1), {}, 0.0, {"computation": s})
        for i, s in enumerate(expected)
    ]


def test_what_traces_show_of_a_kind_corrects_what_is_expected_of_it():
    """The sketches of tp=1 are half of what its traces say, so that those of tp=2 are tried before the rest of them,
    and found faster."""
    sketches = sketched(*(1.0 + i / 100 for i in range(12))) + sketched(1.6, 1.7, tp=2)
    seconds = {s.candidate: s.step_s * (2.0 if s.candidate.tp == 1 else 1.0) for s in sketches}
    pool = Told(lambda c: reported(seconds[c]))
    fits, over = search.trace_best(None, sketches, H100, 1, str, pool)
    assert [c.tp for c in pool.asked] == [1, 1, 1, 1, 2, 2] and not over, (
        "and no more, as none is expected to be faster"
    )
    assert min(fits, key=lambda found: found.report.step_s).candidate.tp == 2


def test_what_a_trace_says_decides_what_fits():
    sketches = sketched(*(1.0 + i / 100 for i in range(9)))
    pool = Told(lambda c: reported(1.0 + c.rp / 100, fits=c.rp % 2 == 0))
    fits, over = search.trace_best(None, sketches, H100, 3, str, pool)
    assert [found.candidate.rp for found in fits] == [2, 4, 6] and {found.candidate.rp for found in over} >= {1, 3, 5}


def test_a_reason_is_what_most_of_the_difference_is():
    best = reported(10.0)
    tp = reported(11.5, exposed={"tp": 2.0}, phases={"forward": 9.0, "update": 0.5})
    assert search_result.slower(tp, best) == "15% slower: 2 s more exposed communication on tp"
    again = reported(12.0)
    again.flop_per_step = 130
    assert search_result.slower(again, best) == "20% slower: 2 s more recomputation (30% more FLOPs)"
    assert search_result.slower(reported(10.001), best) == "as fast"


def test_why_something_is_not_tried():
    room, c = search_result.RankMemory(80 * 10**9, 200 * 10**9), Candidate(8, 1, 1, 3, "full", "", 1)
    sketch = closed_forms.Sketch(c, {"grads": 60e9, "params": 30e9}, 0.0, {})
    assert search_result.explain_sketch_overflow(
        sketch, room
    ) == "does not fit: 90 GB of 80 GB, 10 GB too much; grads 60 GB" and not room.fits(sketch)
    sketch = sketch._replace(memory={"grads": 60e9, "params": 14e9})
    assert (
        search_result.explain_sketch_overflow(sketch, room)
        == "too close: 74 GB of 80 GB, and closed forms may fill 90%; grads 60 GB"
    )
    hosted = sketch._replace(memory={"grads": 10e9}, host_bytes=250e9)
    assert (
        search_result.explain_sketch_overflow(hosted, room)
        == "does not fit: 250 GB in the host's memory, where a rank can have 200 GB"
    )
    assert not room.fits(hosted)
    assert room.fits(hosted._replace(host_bytes=150e9)) and search_result.RankMemory(80 * 10**9, None).fits(hosted)
    assert search_result.closest_sketch([sketch, hosted], room) == sketch


def test_candidates_are_all_and_only_what_a_run_takes():
    c = config_table.from_table(SMALL)
    every = list(estimate.candidates(c, 4, 4, {"train.remat": ("none", "full"), "offload": ("", "acts=host")}))
    assert len(set(every)) == len(every)
    assert all(x.pp * x.dp * x.rp * x.tp == 4 and c.train.batch % (x.micro_batch * x.dp * x.rp) == 0 for x in every)
    assert {x.tp for x in every} == {1, 2, 4} and {x.zero for x in every} == {0, 1, 2, 3}
    piped = [x for x in every if x.pp > 1]
    assert {x.pp for x in piped} == {2} and {x.schedule for x in piped} == {"1f1b", "zb-h1"}, "a layer for each stage"
    assert all(c.train.batch // (x.micro_batch * x.dp) >= x.pp and x.rp == 1 for x in piped)
    assert {x.remat for x in piped if x.schedule == "zb-h1"} == {"none"}
    assert not any(x.offload == "acts=host" and x.remat == "none" for x in every)
    for x in every[:: len(every) // 20]:
        build.build(machine.resolve_auto(x.apply_to(c), H100.target), fzero.fake_mesh(x.mesh))
    assert {x.cp for x in every} == {1}, "sequences are short"
    assert {x.tp for x in estimate.candidates(c, 8, 2)} == {1, 2}, "tp stays within a node"
    assert estimate.sizes_of_tp(c, 4, 6) == [1, 2], "a group of tp is never on two nodes"
    assert {(x.dp, x.rp) for x in estimate.candidates(c, 8, 2) if x.tp == x.pp == 1} == {(8, 1), (4, 2), (2, 4)}
    with pytest.raises(
        ValueError,
        match=r"no mesh of 64 ranks can share a batch of 8 sequences: with tp=4.*use a batch that 16",
    ):
        list(estimate.candidates(c, 64, 8))
    few = list(estimate.candidates(c, 4, 4, {"zero": (3,), "train.micro_batch": (2,)}))
    assert {x.zero for x in few} == {0, 3} and {x.micro_batch for x in few} == {2} and {x.tp for x in few} == {1, 2, 4}
    with pytest.raises(ValueError, match=r"choices gives 'remat'.*; a search tries zero, train.remat, offload, train"):
        list(estimate.candidates(c, 4, 4, {"remat": ("none",)}))


def test_long_sequences_are_split_over_cp(monkeypatch):
    c = config_table.from_table(SMALL)
    monkeypatch.setattr(estimate, "LEAST", c.data.seq_len // 2)  # tokens that a rank keeps
    few = {"train.remat": ("none",), "offload": ("",), "zero": (3,), "mesh.pp": (1,), "train.micro_batch": (8,)}
    every = list(estimate.candidates(c, 4, 4, few))
    assert {x.cp for x in every} == {1, 2} and all(x.dp * x.rp * x.cp * x.tp == 4 for x in every)
    found = fzero.search(SMALL, 2, choices={**few, "mesh.cp": (2,)}, top=1)
    best = found.best[0]
    assert best.candidate.cp == 2 and found.config.mesh == {"cp": 2}
    assert "pieces over cp=2; bytes of a rank in attention" in str(found)
    config = machine.resolve_auto(c, H100.target)
    sketch = closed_forms.sketch_candidate(closed_layer.Basis(config, H100, 4), best.candidate)
    assert sketch.bytes == pytest.approx(best.report.peak_bytes_per_rank, rel=0.4)
    assert sketch.time["communication on cp"] > 0.0


@pytest.mark.parametrize(
    "c",
    [
        Candidate(4, 1, 1, 3, "none", "", 2),
        pytest.param(Candidate(2, 1, 2, 1, "full", "", 1), marks=pytest.mark.slow),
        pytest.param(Candidate(2, 2, 1, 2, "none", "", 1), marks=pytest.mark.slow),
        Candidate(1, 1, 4, 0, "none", "", 4),
        *(
            pytest.param(c, marks=pytest.mark.slow if c.schedule == "1f1b" else pytest.mark.exhaustive)
            for c in (
                Candidate(2, 1, 1, 0, "none", "", 1, pp=2),
                Candidate(1, 1, 1, 0, "none", "", 1, pp=4, schedule="zb-h1"),
                Candidate(2, 1, 1, 3, "full", "", 1, pp=2, schedule="interleaved", chunks=2),
                Candidate(1, 1, 2, 0, "none", "", 1, pp=2, schedule="zb-v", chunks=2),
            )
        ),
    ],
    ids=search_result.words,
)
def test_a_sketch_is_near_the_trace(c):
    """Rough on purpose: what it decides is the order in which candidates are traced."""
    big = config_table.from_table(
        {
            **SMALL,
            "model": {
                **SMALL["model"],
                "vocab_size": 1024,
                "d_model": 512,
                "d_ff": 1408,
                "n_layers": 4,
                "max_len": 1024,
            },
            "data": {"seq_len": 1024},
        }
    )
    sketch = closed_forms.sketch_candidate(closed_layer.Basis(machine.resolve_auto(big, H100.target), H100, 4), c)
    exact = fzero.plan(c.apply_to(big), c.mesh)
    assert 0.6 < sketch.bytes / exact.peak_bytes_per_rank < 1.6
    assert 0.4 < sketch.step_s / exact.step_s < 2.5


def test_a_host_that_updates_during_the_backward_pass_is_expected_to_take_less():
    """Of an update in the memory of a GPU's host, what the last backward pass is long enough for is not seen."""
    c, found = Candidate(4, 1, 1, 1, "none", "opt=host", 2), {}
    for update in ("end", "speculate"):
        config = config_table.from_table(
            {**SMALL, "offload": "opt=host", "train": {**SMALL["train"], "update": update}}
        )
        for backward_s in (1e-9, 1.0):  # of a layer and a sequence
            layer = closed_layer.Layer(LayerBytes(0, 0, 0), 1e-3, backward_s, 0.0, 0.0, 0.0, 0.0)
            basis = closed_layer.Basis(config, H100, 4, {1: layer})
            found[update, backward_s] = closed_forms.step_time(basis, c)
            elements = basis.plan(4, 1, 1, 1, 1, 1)[1]["opt"]
    rate = H100.host_memory_bytes_s * H100.efficiency.get("host", 1.0) / 4
    alone, short = 28 * elements / rate, 2 * SMALL["model"]["n_layers"] * 1e-9
    assert found["end", 1e-9]["update"] == found["end", 1.0]["update"] == pytest.approx(alone, rel=1e-9)
    assert found["speculate", 1e-9]["update"] == pytest.approx(alone - short, rel=1e-9) and short < alone
    assert found["speculate", 1.0]["update"] == 0.0
    for backward_s in (1e-9, 1.0):
        assert found["speculate", backward_s] | {"update": 0} == found["end", backward_s] | {"update": 0}


def test_what_does_not_fit_is_said(monkeypatch):
    tight = devices.device("h100", memory_bytes=H100.reserved_bytes + 100_000)
    with pytest.raises(ValueError, match=r"nothing fits on 2 NVIDIA H100.*does not fit: .* too much.*use more devices"):
        fzero.search(SMALL, 2, gpu=tight, choices={"train.remat": ("none",), "offload": ("",)})


def test_a_search_needs_rates(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="fzero bench"):
        fzero.search(SMALL, 2, gpu="here")


@pytest.mark.parametrize("name", ["run.toml", "run.json"])
def test_the_written_config_reads_back(found, tmp_path, name):
    path = tmp_path / name
    search.write_config(found.config, path)
    from fzero.core import config_tables

    assert config_table.from_table(config_tables.read_table(path)) == found.config
    if name == "run.toml":
        assert len(path.read_text().splitlines()) < 40, "what equals the preset is left out"
    assert found.config.mesh == found.best[0].candidate.mesh


@pytest.mark.slow
def test_a_search_of_the_command_line_is_trained(capsys, monkeypatch, tmp_path):
    """Two commands: the search writes the config of a run, and the run is made of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("\n".join(f"line {i} of a text" for i in range(400)))

    def fz(*args):
        with pytest.raises(SystemExit) as ended:
            main.main(list(args))
        out, err = capsys.readouterr()
        assert ended.value.code == 0, err
        return out, err

    flags = [f for f in FLAGS if not any(word in f for word in ("policy", "precision", "micro_batch", "remat"))]
    steps = ["--steps", "2", "--seq-len", "64", "--batch", "4", "--data", "text.txt", "--precision", "fp32"]
    out, err = fz("plan", "--search", "--world-size", "1", *flags_of(flags), *steps, "--top", "1", "--out", "best.toml")
    assert "the fastest" in out and "fzero pretrain --config best.toml" in err
    fz(
        "pretrain",
        "--config",
        "best.toml",
        "--out",
        "run",
        "--peak-tflops",
        "1",
        "--prompt",
        "",
        "--set",
        "precision.fp32_matmul=default",
    )
    assert [row["step"] for row in run_folder.read_metrics(tmp_path / "run")] == [1, 2]


def flags_of(flags):
    """Pairs of `--set a=b`, with those whose value was taken out left out."""
    values = [f for f in flags if f != "--set"]
    return [part for value in values for part in ("--set", value)]

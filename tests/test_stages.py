"""A run whose sequences become longer: its stages, the data they read, resumes, replays, refusals."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launched import hashes, rows, torchrun

from fzero import checkpoint, data
from fzero.data import packing
from fzero.run import auto_resume, build_optim, from_table, pretrain, replay, rollback, run_folder, to_table
from fzero.run import build as run_build
from fzero.run.config.stages import Ramp, change_stage, count_tokens, read_stage, stage_of_step, stages_of
from fzero.run.setup import corpus
from fzero.run.setup.elastic import refit_mesh
from fzero.sharding import fake_mesh

SIZES = {"n_layers": 1, "d_model": 16, "d_ff": 24, "n_heads": 2, "n_kv_heads": 2, "max_len": 64}
TINY = [
    *(
        "--model",
        "llama-tiny",
        "--steps",
        8,
        "--batch",
        8,
        "--micro-batch",
        2,
        "--seq-len",
        64,
        "--packing",
        "best-fit",
    ),
    *("--precision", "fp32", "--peak-tflops", 1, "--data", "corpus", "--prompt", ""),
    *(part for name, size in SIZES.items() for part in ("--set", f"model.{name}={size}")),
    *("--set", "train.compiled=false", "--set", "precision.fp32_matmul=default", "--set", "train.eval_batches=2"),
    *("--set", "train.checkpoint_every=2", "--set", "train.keep_last=0", "--set", "train.digest_every=1"),
    *("--set", "train.eval_every=4", "--set", "train.loss_by_position=true"),
]
LONGER = ("--seq-len", 256, "--batch", 4, "--micro-batch", 1, "--rope-scaling", "llama3:4:64")
STAGE = "4: data.seq_len=64 train.batch=8 train.micro_batch=2 model.max_len=64 model.rope_scaling=none"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    texts = [f"line {i}: {i * i} is the square of {i}\n" * (1 + i % 23) for i in range(60)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data.prepare(folder / "texts.jsonl", folder / "corpus", val_fraction=0.1)
    return folder


@pytest.fixture
def here(home, monkeypatch):
    monkeypatch.chdir(home)
    return home


@pytest.fixture
def extended(fz, here):
    """A run of 4 steps of 8 x 64 tokens and 4 more of 4 x 256."""
    if not Path("extended").is_dir():
        assert fz("pretrain", *TINY, "--out", "extended", "--stop-at", 4)[0] == 0
        code, out, err = fz("pretrain", "--resume", "--out", "extended", *LONGER, "--prompt", "")
        assert code == 0, err
        assert "the model takes 256 positions now, before that 64 (model.max_len)" in out
    return here / "extended"


def config_of(run):
    return run_folder.read_config(Path(run))


def test_the_config_says_what_each_step_had(extended):
    config = config_of(extended)
    assert config.stages == (STAGE,) and (config.data.seq_len, config.model.max_len) == (256, 256)
    assert str(config.model.rope_scaling) == "llama3:4:64"
    first, second = stages_of(config)
    assert (first.config.data.seq_len, first.config.model.rope_scaling, first.config.train.batch) == (64, None, 8)
    assert stage_of_step(config, 3).config == first.config and stage_of_step(config, 4) == second
    manifests = [checkpoint.read_manifest(path)["config"] for path in sorted((extended / "checkpoints").iterdir())]
    assert [(m["data"]["seq_len"], len(m["stages"])) for m in manifests] == [(64, 0)] * 2 + [(256, 1)] * 2
    assert [row["tokens"] for row in rows(extended)] == [512, 1024, 1536, 2048, 3072, 4096, 5120, 6144]
    rates = [row["lr"] for row in rows(extended)]
    assert rates == [
        pytest.approx(float(run_build.build(config).schedule(step))) for step in range(8)
    ]  # goes on by steps


def test_a_run_that_knows_its_stages_from_the_start_is_the_same_bit_for_bit(extended, fz):
    assert fz("pretrain", "--config", "extended/config.json", "--out", "known", "--prompt", "")[0] == 0
    assert rows(Path("known")) == rows(extended) and hashes(Path("known")) == hashes(extended)
    assert config_of("known") == config_of(extended)


def test_steps_before_and_behind_the_change_are_replayed(extended):
    for step, start in ((3, 2), (8, 6), (6, 0)):  # the last one over the change
        result = replay.replay(extended, step, start=start)
        assert result.reproduces and result.tolerance == 0, str(result)


@pytest.mark.slow
def test_a_run_goes_on_in_its_stages_from_any_checkpoint(extended, fz):
    """Stopped in the later stage, and with all checkpoints damaged but one of the earlier: it goes through both."""
    for name, kept in (("later", (2, 4, 6)), ("earlier", (2,))):
        shutil.copytree(extended, name)
        for path in (Path(name) / "checkpoints").iterdir():
            if int(path.name[-8:]) not in kept:
                shutil.rmtree(path)
        assert fz("pretrain", "--resume", "--out", name, "--prompt", "")[0] == 0
        assert rows(Path(name)) == rows(extended) and hashes(Path(name)) == hashes(extended)


def spoiled(monkeypatch, wrong):
    """A number of the parameters is none in the steps for whose (state, batch) `wrong` is true."""
    for module in (pretrain, run_build):  # the first stage's job, and another stage's

        def planted(*args, build=module.build, **named):
            job = build(*args, **named)

            def step(state, batch):
                weight = state.params["blocks"]["attn"]["w_q"].view(-1)
                kept, bad = weight[3].clone(), wrong(state, batch)
                if bad:
                    weight[3] = float("nan")
                state, metrics = job.train_step(state, batch)
                if bad:
                    state.params["blocks"]["attn"]["w_q"].view(-1)[3] = kept
                return state, metrics

            return job._replace(train_step=step)

        monkeypatch.setattr(module, "build", planted)


BACK = ("--set", "guard.nonfinite=rollback", "--set", "guard.rollback_steps=3")


def test_a_rollback_goes_back_into_an_earlier_stage(extended, fz, monkeypatch):
    """And through both again: with the bits of the run without it, losses by position too."""
    left = [5]
    spoiled(monkeypatch, lambda state, batch: int(state.step) in left and not left.remove(int(state.step)))
    code, out, err = fz("pretrain", "--config", "extended/config.json", "--out", "back", "--prompt", "", *BACK)
    assert (code, err) == (0, "") and "step 6: the gradient is not finite; back to step 2" in out
    assert "after step 2 in another stage: 8 x 64 a step" in out
    assert out.count("after step 4 in another stage: 4 x 256 a step") == 2
    assert rows(Path("back")) == rows(extended) and hashes(Path("back")) == hashes(extended)
    assert [list(row.get("val_loss_by_position", "")) for row in rows(Path("back"))[3::4]] == [
        *(list(row["val_loss_by_position"]) for row in rows(extended)[3::4]),
    ]


@pytest.mark.exhaustive
def test_a_batch_of_a_later_stage_is_left_out_behind_a_rollback_into_an_earlier_one(extended, fz, monkeypatch):
    """The steps before it have the bits of the run without it, and those behind it the batches that follow."""
    read = corpus.open_micro_batches(config_of(extended), Path("corpus"))
    batches = [torch.cat([read(32 + 4 * i, m)["tokens"] for m in range(4)]) for i in range(5)]
    seen = []

    def wrong(state, batch):
        seen.append(batch["tokens"].reshape(-1, batch["tokens"].shape[-1]).clone())
        return seen[-1].shape == batches[1].shape and torch.equal(seen[-1], batches[1])

    spoiled(monkeypatch, wrong)
    code, out, err = fz("pretrain", "--config", "extended/config.json", "--out", "out", "--prompt", "", *BACK)
    assert (code, err) == (0, "") and "samples 36 to 39 are left out" in out
    assert rows(Path("out"))[:5] == rows(extended)[:5]
    for batch, expected in zip(seen[-4:], (0, 2, 3, 4)):
        assert torch.equal(batch, batches[expected])
    assert [row["tokens"] for row in rows(Path("out"))] == [row["tokens"] for row in rows(extended)]


def test_what_one_stage_leaves_the_next_one_reads_once_on_every_mesh(extended):
    """The positions that the batches of an epoch have, by the tokens of a corpus that are their places."""
    first, second = stages_of(config_of(extended))
    plain = data.open_tokens(extended.parent / "corpus")
    places = plain._replace(tokens=torch.arange(len(plain.tokens)).numpy(), sums=None)
    wanted = {i for begin, end in packing.within_documents(plain).tolist() for i in range(begin, end)}
    before = data.TokenStream(plain, 64, 8, packing="best-fit")
    left = len(
        data.TokenStream(plain, 256, 4, packing="best-fit", remainder=before.remainder_after(first.samples)).first_rows
    )
    for sizes, size in (({}, 1), ({"dp": 2}, 2), ({"dp": 2, "rp": 2}, 4)):
        seen = []
        for stage, samples in ((first, first.samples), (second, left)):
            for rank in range(size):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(data, "open_tokens", lambda *_: places)
                    batch_at = corpus.open_data(stage.config, Path("corpus"), fake_mesh(sizes, rank))[0]
                for sample in range(0, samples, stage.config.train.batch):
                    batch = batch_at(sample + (first.samples if stage is second else 0))
                    seen += batch["tokens"][batch["mask"]].tolist()
        again = len(seen) - len(set(seen))  # of the next epoch, in the last batch
        assert set(seen) == wanted and again <= -left % 4 * 256


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--seed", 9), "leave out --seed, or start a new run without --resume"),
        (("--seq-len", 0), "--seq-len is 0; it must be at least 1"),
        (("--rope-scaling", "yarn:4"), "the scaling of RoPE is 'yarn:4'; it must be linear:FACTOR, llama3:FACTOR"),
        (
            ("--rope-scaling", "llama3:4"),
            "llama3:FACTOR:LENGTH or yarn:FACTOR:LENGTH with the length that the model was trained with before",
        ),
        (("--packing", "greedy"), "data.packing is 'greedy'; it must be one of stream, best-fit"),
        (("--batch", 4, "--micro-batch", 3), "train.micro_batch is 3 and does not divide train.batch=4"),
        (("--seq-len", 128), "is complete: it has made its 8 steps"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused_in_one_line(extended, fz, args, message):
    before = (extended / "config.json").read_text()
    code, _, err = fz("pretrain", "--resume", "--out", "extended", *args)
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1
    assert (extended / "config.json").read_text() == before


def test_positions_that_are_parameters_do_not_grow():
    config = from_table({"preset": "gpt2-tiny", "model": {"max_len": 64}, "data": {"seq_len": 64}})
    said = []
    with pytest.raises(ValueError, match=r"the model has positions of its own for 64 \(embed/positions, \[64, \d+\]\)"):
        auto_resume.with_changes(config, {"data.seq_len": 128}, said.append)
    assert auto_resume.with_changes(config, {"data.seq_len": 32}, said.append)[1] == {"data.seq_len": 32}
    with pytest.raises(ValueError, match=r"unknown key 'model.rope_theta'"):
        auto_resume.with_changes(config, {"model.rope_theta": 1e6}, said.append)
    assert not said


def test_lengths_that_ranks_do_not_divide_are_refused():
    config = from_table(
        {"mesh": {"tp": 2}, "sequence": True, "precision": {"policy": "fp32"}, "train": {"compiled": False}}
    )
    with pytest.raises(ValueError, match=r"data.seq_len is 255, which sequence parallelism over tp=2 does not divide"):
        run_build.build(auto_resume.with_changes(config, {"data.seq_len": 255}, print)[0], fake_mesh({"tp": 2}))


def test_stages_as_values():
    start = from_table({"preset": "llama-tiny", "train": {"steps": 100}, "data": {"seq_len": 64}})
    assert change_stage(start, {"data.seq_len": 64}, 10) == start  # nothing changes
    assert change_stage(start, {"data.seq_len": 128}, 0) == from_table(
        {"preset": "llama-tiny", "train": {"steps": 100}, "data": {"seq_len": 128}}
    )
    once = change_stage(start, {"data.seq_len": 128}, 10)
    twice = change_stage(once, {"data.seq_len": 512, "train.batch": 8}, 30)
    assert [(s.begin, s.end, s.config.data.seq_len) for s in stages_of(twice)] == [
        *((0, 10, 64), (10, 30, 128), (30, 100, 512)),
    ]
    assert [stage_of_step(twice, step).config.stages for step in (9, 29, 99)] == [(), once.stages, twice.stages]
    assert [stage_of_step(twice, step).config for step in (9, 29)] == [start, once]
    assert change_stage(once, {"data.seq_len": 256}, 10) == change_stage(start, {"data.seq_len": 256}, 10)  # no step
    assert change_stage(twice, {"data.seq_len": 32}, 5).stages == (change_stage(start, {"data.seq_len": 32}, 5)).stages
    assert count_tokens(twice, 40) == 16 * (10 * 64 + 20 * 128) + 10 * 8 * 512
    assert count_tokens(twice, 20) == 16 * (10 * 64 + 10 * 128)
    for text, message in (
        ("10", "a stage is its last step and its values"),
        ("10: data.seq_length=3", r"stages has 'data.seq_length' \(did you mean data.seq_len\?\)"),
        ("10: data.seq_len=x", "stages has 'data.seq_len=x': invalid literal"),
        ("100: data.seq_len=32", "stages end after the steps 100, 100"),
        ("10: data.seq_len=4096", "data.seq_len is 4096 and the model takes 1024"),
        ("10: data.packing=none", "data.packing is 'none'"),
    ):
        with pytest.raises(ValueError, match=message):
            from_table({"train": {"steps": 100}, "stages": [text]})
    assert read_stage("5: model.rope_scaling=linear:2")[1]["model.rope_scaling"].factor == 2.0


def test_batches_left_out_count_in_the_stage_that_left_them_out(tmp_path):
    config = from_table({"preset": "llama-tiny", "train": {"steps": 100}, "data": {"seq_len": 64}})
    longer = change_stage(config, {"data.seq_len": 128, "train.batch": 8, "train.micro_batch": 4}, 10)
    assert corpus.first_samples(longer, []) == [0, 160]
    assert corpus.first_samples(longer, [(32, 16)]) == [0, 176]  # the first stage left a batch out
    assert corpus.first_samples(longer, [(160, 8), (200, 8)]) == [0, 160]  # its own
    log = rollback.read_log(tmp_path)._replace(skips=[[32, 16], [176, 16]], tried=[48, 192])
    rollback.write_log(tmp_path, log)
    auto_resume.drop_later_skips(tmp_path, longer)  # what the first stage would have left out behind its end
    assert rollback.read_log(tmp_path)[:2] == ([[32, 16]], [48])


@pytest.mark.slow
def test_the_report_has_both_stages_and_the_loss_by_position(extended, fz):
    assert fz("report", "extended", "--out", "pages")[0] == 0
    text = Path("pages/report.md").read_text()
    assert "| 8 x 64 |" in text and "| 4 x 256 |" in text and Path("pages/loss_by_position.svg").is_file()
    last = rows(extended)[-1]["val_loss_by_position"]
    assert list(last) == ["2", "4", "8", "16", "32", "64", "128", "256"]
    for end, value in last.items():
        assert f"| {end} |" in text and f"{value:.3f}" in text


@pytest.mark.exhaustive
def test_another_mesh_makes_the_same_of_it(extended):
    folder = extended.parent
    start = [*TINY, "--set", "reduce=canonical"]
    torchrun(folder, 1, *start, "--out", "one", "--stop-at", 4)
    torchrun(folder, 1, "--resume", "--out", "one", *LONGER, "--prompt", "")
    torchrun(folder, 2, *start, "--zero", 3, "--out", "two", "--stop-at", 4)
    torchrun(folder, 2, "--resume", "--out", "two", *LONGER, "--prompt", "")
    assert [row["loss"] for row in rows(folder / "one")] == [row["loss"] for row in rows(folder / "two")]
    assert hashes(folder / "one") == hashes(folder / "two")


# -- a batch that grows

RAMPS = {
    "16": "train.batch_ramp is '16'; a ramp is START:INCREMENT:TOKENS",
    "2:2:x": "train.batch_ramp is '2:2:x': 'x' is no number",
    "2:0:100": "train.batch_ramp is '2:0:100': 0 is no whole number of at least 1",
    "2:2.5:100": "2.5 is no whole number of at least 1",
    "16:2:100": "train.batch_ramp is 16:2:100, which begins above train.batch=8; batches grow: begin with less",
    "2:4:100": "whose steps of 4 do not lead from 2 to train.batch=8; use --batch 6 or 10, or another increment",
    "3:5:100": "which begins with 3 sequences, and train.micro_batch=2 does not divide that",
    "2:3:100": "which grows by 3 sequences, and train.micro_batch=2 does not divide that",
}


@pytest.mark.parametrize("text", RAMPS)
def test_a_ramp_that_cannot_be_is_one_line(text, fz, here):
    code, _, err = fz("pretrain", *TINY, "--batch-ramp", text, "--out", "bad")
    assert code == 2 and RAMPS[text] in err and len(err.strip().splitlines()) == 1
    assert not Path("bad").exists()


def test_a_ramp_has_the_batch_of_the_tokens_before_each_step():
    for start, increment, every, batch, seq_len in (
        (2, 2, 100, 8, 5),
        (4, 1, 7, 9, 16),
        (3, 3, 1000, 3, 2),
        (1, 1, 1, 30, 1),
    ):
        ramp, tokens, sizes = Ramp(start, increment, every), 0, []
        for _ in range(60):
            sizes.append(min(batch, start + tokens // every * increment))
            tokens += sizes[-1] * seq_len
        assert [size for size, steps in ramp.pieces(batch, seq_len, 0, 60) for _ in range(steps)] == sizes
        after = sum(sizes[:23]) * seq_len
        assert [size for size, steps in ramp.pieces(batch, seq_len, after, 37) for _ in range(steps)] == sizes[23:]


def ramped(**train):
    values = {"batch": 12, "micro_batch": 1, "batch_ramp": "4:4:2000", "steps": 40, **train}
    return from_table({"preset": "mlp-tiny", "data": {"seq_len": 32}, "train": values})


def test_the_stage_of_each_size_is_that_of_a_run_that_ends_with_it():
    config = replace(ramped(), stages=("9: data.seq_len=16",))
    found = stages_of(config)
    assert [(s.begin, s.batch, s.config.data.seq_len, s.reads_on) for s in found] == [
        (0, 4, 16, False), (9, 4, 32, False), (21, 8, 32, True), (29, 12, 32, True),
    ]  # fmt: skip
    for stage in found:
        again = stages_of(stage.config)
        assert [(s.begin, s.batch) for s in again] == [(s.begin, s.batch) for s in found if s.begin <= stage.begin]
    assert count_tokens(config, 40) == (9 * 4 * 16) + 32 * (12 * 4 + 8 * 8 + 11 * 12)
    longer = change_stage(config, {"data.seq_len": 64}, 24)
    assert [(s.begin, s.batch, s.config.data.seq_len) for s in stages_of(longer)][2:] == [
        (21, 8, 32),
        (24, 8, 64),
        (27, 12, 64),
    ]


def test_ranks_that_cannot_share_every_batch_of_a_ramp_are_refused_at_the_start():
    config = replace(ramped(), precision=replace(ramped().precision, policy="fp32", fp32_matmul="default"))
    config = replace(config, train=replace(config.train, compiled=False))
    run_build.build(config, fake_mesh({"dp": 4}))
    other = replace(config, train=replace(config.train, batch_ramp="6:6:2000"))
    with pytest.raises(
        ValueError, match=r"train.batch_ramp is 6:6:2000, .* the 4 data ranks cannot share evenly; begin"
    ):
        run_build.build(other, fake_mesh({"dp": 4}))
    assert refit_mesh(other, {"dp": 4}, 4)[0] == {"dp": 3}, "a resumed run takes as many as share all of them"


def test_a_rate_by_tokens_is_that_of_the_tokens_before_the_step():
    schedule = {"name": "cosine", "tokens": 9000, "warmup_tokens": 700, "warmup_steps": 0}
    config = from_table(
        {
            **to_table(ramped()),
            "optim": {"schedule": schedule},
            "precision": {"policy": "fp32", "fp32_matmul": "default"},
        }
        | {"train": {**to_table(ramped())["train"], "compiled": False}}
    )
    plain = replace(config.optim, schedule=replace(config.optim.schedule, tokens=0, warmup_tokens=0, warmup_steps=700))
    by_token = build_optim.make_schedule(plain, config.optim.lr, 9000)
    for step in (0, 3, 4, 17, 22, 39):
        job = run_build.build(stage_of_step(config, step).config, fake_mesh({}))
        assert float(job.schedule(step)) == pytest.approx(float(by_token(count_tokens(config, step))), rel=1e-12)


SCHEDULES = {
    "warmup_steps=3": "optim.schedule.warmup_steps is 3 and optim.schedule.tokens is 500, a length in tokens; use "
    "warmup_steps=0 and warmup_tokens",
    "warmup_tokens=600": "warmup_tokens=600 and decay_tokens=0 are longer than tokens=500",
    "tokens=0": "optim.schedule.warmup_tokens is 30 and optim.schedule.tokens is 0: it follows the steps; use "
    "warmup_tokens=0 and warmup_steps",
    "decay_tokens=30": "optim.schedule.decay_tokens does nothing with cosine, which has end, tokens, warmup_steps",
}


@pytest.mark.parametrize("change", SCHEDULES)
def test_lengths_in_steps_and_in_tokens_are_not_mixed(change, fz, here):
    values = {"tokens": "500", "warmup_tokens": "30", "warmup_steps": "0"} | dict([change.split("=")])
    settings = [part for key, value in values.items() for part in ("--set", f"optim.schedule.{key}={value}")]
    code, _, err = fz("pretrain", *TINY, *settings, "--out", "bad")
    assert code == 2 and SCHEDULES[change] in err and len(err.strip().splitlines()) == 1


@pytest.mark.exhaustive
def test_a_batch_that_is_left_out_of_a_ramp_is_the_only_one(fz, here, monkeypatch):
    """Its samples are missing, and all others come once, in order, though the sizes of the batches after it are those
    of their steps."""
    args = [*TINY, "--batch-ramp", "2:2:300", "--seq-len", 64, *BACK]
    seen = []

    def wrong(state, batch):
        rows = batch["tokens"].reshape(-1, 64).clone()
        seen.append((int(state.step), rows))
        return len(rows) == 6 and torch.equal(rows, bad)

    config = from_table({"preset": "llama-tiny", "data": {"seq_len": 64, "packing": "best-fit"}})
    stream = corpus.open_stream(config, Path("corpus"), "train", 1)
    order = stream.samples_at(0, 60)["tokens"]
    bad = order[10:16]
    spoiled(monkeypatch, wrong)
    code, out, err = fz("pretrain", *args, "--out", "ramp-left-out")
    assert (code, err) == (0, "") and "samples 10 to 15 are left out" in out, out + err
    last = dict(seen)  # the rows of each step as it was made last
    assert [len(last[step]) for step in range(8)] == [2, 2, 2, 4, 6, 8, 8, 8]
    assert torch.equal(torch.cat([last[step] for step in range(8)]), torch.cat([order[:10], order[16:46]]))
    code, out, _ = fz("replay", "ramp-left-out", "--step", 8)
    assert code == 0, out

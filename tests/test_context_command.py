"""`fzero` with cp on its mesh: runs whose checkpoints go on on other meshes, replays, comparisons, samples, and one
line for what cannot be split."""

import pytest
from launched import SHORT, TINY, ended, folder_with_run, rows, start, torchrun

MODEL = [*TINY, "--set", "train.loss_by_position=true"]
KEPT = ["--set", "train.checkpoint_every=2", "--set", "train.keep_last=0", "--set", "train.digest_every=1"]
KEPT += ["--set", "guard.check_every=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text and `alone`, a run of one process on it."""
    return folder_with_run(tmp_path_factory, "context", "alone", *MODEL, *SHORT)


RUNS = {  # ranks, how they have the sequences, and how the run goes on
    "ring": (2, ["--mesh", "cp=2", "--context", "ring", "--zero", 3], (2, ["--mesh", "dp=2"])),
    "gather": (2, ["--mesh", "cp=2", "--context", "gather:balanced", "--zero", 1], (1, ["--mesh", ""])),
    "hierarchical": (
        4, ["--mesh", "cp=4", "--context", "hierarchical", "--zero", 3],
        (4, ["--mesh", "dp=2,cp=2", "--context", "ulysses"]),
    ),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUNS)
def test_a_run_equals_one_process_and_goes_on_elsewhere(folder, name, fz, monkeypatch):
    monkeypatch.chdir(folder)
    n, how, (others, mesh) = RUNS[name]
    out = torchrun(folder, n, *MODEL, *SHORT, *how, *KEPT, "--stop-at", 4, "--out", name, "--prompt", "", timeout_s=600)
    assert f"context: {name} of " in out and f"over cp={n}" in out
    assert "reproduces bit for bit" in torchrun(folder, n, name, "--step", 3, verb="replay", timeout_s=600)
    code, out, err = fz("replay", name, "--step", 4)
    assert (code, err) == (0, "") and "on one process" in out and "agrees within" in out
    on = ["--out", name, "--resume", "--peak-tflops", 1, "--prompt", "line ", *mesh]
    if others == 1:
        code, out, err = fz("pretrain", *on)
        assert (code, err) == (0, ""), err
    else:
        out = torchrun(folder, others, *on, timeout_s=600)
        assert f"a sample, by rank 0 with the weights gathered from {others} ranks" in out
    assert f"resuming {name} at step 4 of 6" in out
    expected, found = rows(folder / "alone"), rows(folder / name)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(found, expected):
        for by_position in [key for key, value in b.items() if isinstance(value, dict)]:
            assert a[by_position] == pytest.approx(b.pop(by_position), rel=1e-4)
        assert {key: a[key] for key in b} == pytest.approx(b, rel=1e-4)
    sampled = [
        fz("sample", run, "--prompt", "line ", "--max-new-tokens", 8, "--temperature", 0) for run in (name, "alone")
    ]
    assert sampled[0] == sampled[1] and sampled[0][0] == 0


REFUSED = {
    "--mesh cp=2 --context gather:zigzag --seq-len 18": "the sequences have 18 tokens, which cannot be cut into 4 "
    "blocks for cp=2; use 16 or 20",
    "--mesh cp=2 --context ring --seq-len 17": "the sequences have 17 tokens, which cannot be cut into 2 blocks for "
    "cp=2; use 16 or 18",
    "--mesh cp=8 --context ulysses --seq-len 64": "context ulysses: cp=8 does not divide the 4 heads; use cp in "
    "{1, 2, 4}, or the form gather",
    "--mesh cp=4,tp=2 --context ulysses": "context ulysses: cp=4 does not divide the 2 heads of a rank of tp=2",
    "--mesh cp=2 --context ulysses:balanced": "in the form ulysses all ranks have as much work; use contiguous pieces",
    "--mesh cp=2 --context rign": "context: form is 'rign' (did you mean ring?)",
    "--mesh cp=2 --context ring:zag": "context: pieces is 'zag' (did you mean zigzag?)",
    "--mesh cp=2 --set model.pattern=window:0": "attention pattern window: size is 0; it must be at least 1",
    "--mesh cp=2 --model mixtral-tiny --set model.capacity_factor=1.0": "cp splits the sequences of gpt2, llama, ",
}


@pytest.mark.parametrize("args", REFUSED)
def test_what_cannot_be_split_is_one_line_of_a_plan(args, fz):
    code, _, err = fz("plan", "--model", "llama-tiny", *args.split())
    assert code == 2 and err.startswith("fzero: error: ") and err.count("\n") == 1 and REFUSED[args] in err, err


@pytest.mark.exhaustive
@pytest.mark.parametrize("args", list(REFUSED)[:1])
def test_what_cannot_be_split_is_one_line_of_a_run(folder, args):
    """Of the first rank, and nothing is left."""
    code, _, said, codes = ended(folder, start(folder, 2, *MODEL, *SHORT, *args.split(), "--out", "new"), 600)
    assert code != 0 and len(said) == 1 and REFUSED[args] in said[0], said
    assert set(codes) == {2} and not (folder / "new").exists()

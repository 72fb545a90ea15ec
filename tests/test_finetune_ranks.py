"""`torchrun -m fzero finetune`: stage 3 on two processes gives the losses of one process, with factors beside weights
and beside codes, on conversations, pairs and texts with labels."""

import chats
import pytest
from launched import rows, torchrun

FLAGS = ["--batch", 4, "--micro-batch", 1, "--seq-len", 96, "--lr", "1e-2", "--precision", "fp32", "--peak-tflops", 1,
         "--steps", 4, "--prompt", "", "--reduce", "canonical", "--set", "train.compiled=false",
         "--set", "train.loggers=[]", "--set", "train.eval_every=2",
         "--set", "precision.fp32_matmul=default"]  # fmt: skip
CASES = {
    "lora": ("chat.jsonl", "--lora", "rank=4"),
    "classify": ("labels.jsonl", "--lora", "rank=4", "--objective", "classify"),
    "qlora": ("chat.jsonl", "--lora", "rank=4", "--quantize", "nf4"),
    "dpo": ("pairs.jsonl", "--lora", "rank=4,dora", "--objective", "dpo"),
    "reward": ("pairs.jsonl", "--lora", "rank=4", "--objective", "reward"),
}


OVER_CP = {  # what is learnt, and how two ranks have the sequences
    "lora": "ring",
    "classify": "gather",
    "qlora": "ulysses",
    "dpo": "gather:balanced",
    "reward": "hierarchical",
}


@pytest.mark.parametrize(
    "name, mesh",
    [
        *(pytest.param(name, [], marks=pytest.mark.slow) for name in CASES if name != "reward"),
        *(
            pytest.param(name, ["--mesh", "cp=2", "--context", form], marks=pytest.mark.exhaustive)
            for name, form in OVER_CP.items()
        ),
    ],
)
def test_stage_3_on_two_processes_is_one_process(name, mesh, tmp_path, fz):
    chats.qwen3_folder(tmp_path / "qwen3")
    chats.chat_file(tmp_path / "chat.jsonl", 12)
    chats.pair_file(tmp_path / "pairs.jsonl", 12)
    labels = ({"text": f"{i} is", "label": "odd" if i % 2 else "even"} for i in range(24))
    chats.write_lines(tmp_path / "labels.jsonl", labels)
    data, *more = CASES[name]
    start = ["--init", tmp_path / "qwen3", "--data", tmp_path / data, *FLAGS, *more]
    code, _, err = fz("finetune", *start, "--out", tmp_path / "one")
    assert (code, err) == (0, "")
    stop = ["--stop-at", 2] if name == "dpo" else []
    torchrun(tmp_path, 2, *start, "--zero", 3, *mesh, "--out", "two", *stop, verb="finetune", timeout_s=600)
    if stop:
        out = torchrun(tmp_path, 2, "--resume", "--out", "two", "--peak-tflops", 1, verb="finetune", timeout_s=600)
        assert "resuming two at step 2 of 4" in out
    expected, found = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert [row["step"] for row in found] == [1, 2, 3, 4] and "val_loss" in found[-1]
    for a, b in zip(found, expected):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    if name != "reward":  # which learns less in 4 steps than one batch differs from another
        assert expected[-1]["loss"] < expected[0]["loss"]
    if name == "dpo":
        folders = [next((tmp_path / run / "data").glob("reference-*")).name for run in ("one", "two")]
        assert folders[0] == folders[1] and found[-1]["margin"] > found[0]["margin"]

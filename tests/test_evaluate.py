"""`fzero evaluate`: tasks of lm-evaluation-harness give a folder of transformers the numbers of the harness' `hf`."""

import json
import math

import chats
import pytest
import torch

from fzero import models
from fzero.checkpoint import convert
from fzero.core import packages
from fzero.generate import Continuation, score_continuations

TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}} ",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "words": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "sums": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{said}}",
        "generation_kwargs": {"until": ["q", "\n"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_tasks(folder, said):
    """Three tasks on the questions of the harness' users; said: what the model says after each."""
    folder.mkdir()
    rows = [
        {"question": f"{i}+{i}é", "choices": ["a", f" {2 * i}", "It is no number"], "answer": i % 3, "said": said[i],
         "text": f"the text {i} of " + "many words " * i}
        for i in range(11)
    ]  # fmt: skip
    chats.write_lines(folder / "rows.jsonl", rows)
    for name, task in TASKS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
        table = {"task": name, "test_split": "test", "num_fewshot": 0, **source, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(table))
    return folder


def test_scores_are_those_of_a_whole_pass_in_any_chunks(tmp_path):
    source = convert.open_source(chats.qwen3_folder(tmp_path / "model"))
    model, params = models.build(source.config), convert.load(source)
    ids = torch.randint(0, 250, (6, 97), generator=torch.Generator().manual_seed(1)).tolist()
    pairs = [Continuation(tuple(row[:k]), tuple(row[k:end])) for row, (k, end) in zip(ids, [(1, 97), (96, 97), (3, 9),
             (40, 60), (1, 2), (17, 33)])]  # fmt: skip
    best = models.logits(model, params, {"tokens": torch.tensor([[5, 6]])})[0, -1].argmax().item()
    pairs.append(Continuation((5, 6), (best,)))
    for step_tokens in (7, 64, 512):
        scores = score_continuations(model, params, pairs, step_tokens=step_tokens)
        for (context, ids), value in zip(pairs, scores):
            tokens = torch.tensor([[*context, *ids]])
            logits = models.logits(model, params, {"tokens": tokens[:, :-1]})[0, len(context) - 1 :].float()
            expected = logits.log_softmax(-1).gather(-1, tokens[0, len(context) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(value.log_probs), expected, rtol=0, atol=2e-5)
            assert value.greedy == bool((logits.argmax(-1) == tokens[0, len(context) :]).all())
        assert scores[-1].greedy and not scores[0].greedy
    outside = (Continuation((1,), (9**9,)), "continuation 0 has the token 387420489; the model has the ids 0 to")
    for bad, said in ((Continuation((), (1,)), "has no context"), (Continuation((1,), ()), "has no ids"), outside):
        with pytest.raises(ValueError, match=said):
            score_continuations(model, params, [bad])
    with pytest.raises(ValueError, match="97 \\+ 1 tokens; max_len is 96"):
        score_continuations(model, params, [Continuation((1,) * 97, (2,))])


@pytest.mark.skipif(packages.installed("lm_eval"), reason="lm-eval is here")
def test_without_the_package_the_command_says_what_to_install(fz):
    code, out, err = fz("evaluate", "run", "--tasks", "x")
    assert (code, out) == (2, "")
    assert err == "fzero: error: fzero evaluate: this needs the package lm_eval; pip install lm_eval\n"


@pytest.mark.slow
def test_tasks_give_the_numbers_of_the_harness_own_model(tmp_path, fz, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = chats.qwen3_folder(tmp_path / "model")
    base = write_tasks(tmp_path / "first", [""] * 11)
    options = {"task_manager": TaskManager(include_path=str(base)), "bootstrap_iters": 0}
    words = {"model": "hf", "model_args": f"pretrained={folder},dtype=float32", "device": "cpu"}
    words["batch_size"] = 1  # its windows of 96 tokens have other sums in a batch of 4: -694.595 and -694.606
    theirs = lm_eval.simple_evaluate(tasks=["sums"], log_samples=True, **words, **options)
    said = [sample["filtered_resps"][0] for sample in theirs["samples"]["sums"]]
    tasks = write_tasks(tmp_path / "tasks", said)
    options["task_manager"] = TaskManager(include_path=str(tasks))
    expected = lm_eval.simple_evaluate(tasks=[*TASKS], log_samples=False, **words, **options)["results"]
    code, out, err = fz("evaluate", folder, "--tasks", ",".join(TASKS), "--task-folder", tasks, "--json")
    assert code == 0, err
    actual = json.loads(out[out.index("{") :])
    count = 0
    for task, metrics in expected.items():
        for name, value in metrics.items():
            if isinstance(value, float):
                pair = (actual[task][name], value)
                # A perplexity is e to the power of what is compared.
                ours, theirs = map(math.log, pair) if "perplexity" in name else pair
                assert abs(ours - theirs) <= 1e-6 * max(1.0, abs(theirs)), (task, name, *pair)
                count += 1
    assert count >= 5 and actual["sums"]["exact_match,none"] == 1.0
    code, _, err = fz("evaluate", folder, "--tasks", "no_such_task")
    assert code == 2 and "--tasks has 'no_such_task', which lm-evaluation-harness does not have" in err

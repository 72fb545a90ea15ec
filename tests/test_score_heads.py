"""Heads of scores: classes and rewards of texts, by their formulas, on meshes, from and to transformers."""

import json

import numpy as np
import pytest
import ranks
import torch
import torch.nn.functional as F
from close import assert_close
from law_cases import F64, FP64, T, V, config_of

import fzero
from fzero import models, optim
from fzero.checkpoint import huggingface
from fzero.core import pytree
from fzero.models import Ctx
from fzero.sharding import Context, gather_on_first

LABELS = ("bad", "fair", "good")
OPTIMIZERS = {"sgd": optim.sgd(0.3), "adam": optim.adamw(1e-2)}


def head_of(model, objective):
    return models.classify(model, LABELS) if objective == "classify" else models.reward(model)


def batch_of(seed, objective, rows=8):
    """Rows of six tokens with several texts each; the last token of each but the first row's last counts."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, V, (rows, T), generator=g)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 2, 3, 3]]).repeat(rows // 2, 1).int()
    mask = torch.ones_like(documents, dtype=torch.bool)
    mask[:, :-1] = documents[:, 1:] != documents[:, :-1]
    mask[0::2, 5] = objective == "classify"  # of pairs: the rest of the row
    targets = torch.randint(0, 3 if objective == "classify" else V, tokens.shape, generator=g)
    return {"tokens": tokens, "targets": targets, "documents": documents, "mask": mask}


def written_out(model, params, batch, objective, alone=False):
    """(losses, margins or who is right) of texts or pairs, by the scores in their rows, or alone."""
    losses, margins, ctx = [], [], Ctx(dtype=F64)
    found = models.logits(model, params, batch, ctx)
    for row in range(len(batch["tokens"])):
        scores = []
        for d in batch["documents"][row].unique().tolist():
            own = batch["documents"][row] == d
            if batch["mask"][row][own].any():
                text = {"tokens": batch["tokens"][row][own][None]}
                score = models.logits(model, params, text, ctx)[0, -1] if alone else found[row][own][-1]
                scores.append((score, batch["targets"][row][own][-1]))
        if objective == "classify":
            losses += [-score.log_softmax(-1)[target] for score, target in scores]
            margins += [(score.argmax() == target).double() for score, target in scores]
        else:
            for (chosen, _), (rejected, _) in zip(scores[0::2], scores[1::2]):
                margins.append((chosen - rejected)[0])
                losses.append(-torch.log(F.sigmoid(margins[-1])))
    return torch.stack(losses), torch.stack(margins)


OBJECTIVES = ["classify", "reward"]
KINDS = ["llama", *(pytest.param(k, marks=pytest.mark.slow) for k in ("gemma", "gpt2", "moe dropless", "deepseek"))]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_its_gradient_are_those_of_the_formula(kind, objective):
    model = head_of(models.build(config_of(kind, dropout=0.0)), objective)
    params, batch = models.init_params(model, fzero.random.key(1), F64), batch_of(0, objective)
    got = models.loss(model, params, batch, Ctx(dtype=F64))
    losses, more = written_out(model, params, batch, objective)
    assert int(got.num_tokens) == len(losses) > 8
    name = "accuracy" if objective == "classify" else "margin"
    assert_close({"loss": got.total, "more": got.extra[name]}, {"loss": losses.sum(), "more": more.sum()}, rtol=1e-10)
    # RoPE's angles are in float32, so what turns by them is alike to that.
    alone = written_out(model, params, batch, objective, alone=True)[0]
    assert_close(alone, losses, rtol=1e-10 if kind == "gpt2" else 1e-6)
    grads = torch.func.grad(lambda p: models.loss(model, p, batch, Ctx(dtype=F64)).total)(params)
    by_hand = torch.func.grad(lambda p: written_out(model, p, batch, objective)[0].sum())(params)
    assert_close(grads, by_hand, rtol=1e-9, atol=1e-12)
    assert set(pytree.names(params)) >= {"head/score"} and "head/w" not in pytree.names(params)


def steps(mesh, kind, objective, optimizer, stage, micro_batches, adapters=False, sequence=False):
    """(parameters, log) of three steps."""
    model = head_of(models.build(config_of(kind, dropout=0.0, vocab_size=V + 1)), objective)
    model = models.lora(model, 2, 2.0, "/w_") if adapters else model
    frozen = models.frozen_leaves(model.config)
    plan = fzero.zero_plan(stage, model, mesh, policy=FP64, frozen=frozen, sequence=sequence)
    tx = OPTIMIZERS[optimizer]
    state = fzero.init_state(model, tx, plan, seed=0)
    step = fzero.make_train_step(model, tx, plan, micro_batches=micro_batches)
    log = []
    for i in range(3):
        state, metrics = step(state, fzero.local_batch(batch_of(i, objective), mesh, micro_batches=micro_batches))
        log.append({"loss": metrics.loss, "norm": metrics.grad_norm, **metrics.extra})
    return gather_on_first(state.params, plan.params, mesh), log


def compare(sizes, kind, objective, *case):
    expected, log = steps(fzero.one_process(), kind, objective, case[0], 0, 1, *case[3:4])
    got = ranks.run(int(np.prod(list(sizes.values()))), steps, kind, objective, *case, mesh=sizes)
    assert_close(got[0][1], log, rtol=1e-10, atol=1e-12)
    assert_close(got[0][0], expected, rtol=1e-10, atol=1e-11)
    return expected


MESHES = [
    ({"dp": 2}, "llama", "classify", "adam", 3, 2),
    ({"tp": 2}, "gemma", "reward", "sgd", 0, 1),
    ({"tp": 2}, "llama", "classify", "sgd", 3, 1, True, True),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ({"tp": 2}, "llama", "classify", "adam", 0, 1), ({"dp": 2}, "gpt2", "reward", "sgd", 2, 2),
        ({"dp": 2}, "llama", "reward", "adam", 1, 1, True), ({"dp": 2, "tp": 2}, "llama", "classify", "adam", 3, 2),
        ({"pp": 2}, "llama", "reward", "adam", 0, 1))),
    ({"cp": 2}, "llama", "reward", "adam", 3, 2, False, Context("ring")),
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (
        ({"cp": 2}, "llama", "classify", "sgd", 0, 1, True, Context("ulysses")),
        ({"dp": 2, "cp": 2}, "gemma", "classify", "adam", 3, 2, False, Context("hierarchical")),
        ({"cp": 3}, "gpt2", "reward", "sgd", 1, 1, False, Context("gather", "zigzag")),
        ({"cp": 2, "pp": 2}, "llama", "reward", "adam", 3, 2, False, Context("gather", "balanced")))),
]  # fmt: skip


@pytest.mark.parametrize("sizes, kind, objective, case", [
    pytest.param(*c.values[:3], c.values[3:], marks=c.marks) if hasattr(c, "values") else (*c[:3], c[3:])
    for c in MESHES])  # fmt: skip
def test_a_mesh_trains_as_one_process(sizes, kind, objective, case):
    compare(sizes, kind, objective, *case)


def test_lora_trains_the_head_beside_its_factors():
    model = head_of(models.build(config_of("llama", dropout=0.0, vocab_size=V + 1)), "classify")
    tuned = models.lora(model, 2, targets="/w_")
    plan = fzero.zero_plan(0, tuned, fzero.one_process(), policy=FP64, frozen=models.frozen_leaves(tuned.config))
    state = fzero.init_state(tuned, OPTIMIZERS["sgd"], plan, seed=0)
    begun = pytree.named_leaves(state.params)
    after = pytree.named_leaves(steps(fzero.one_process(), "llama", "classify", "sgd", 0, 1, adapters=True)[0])
    moved = {name for name, leaf in after.items() if not torch.equal(leaf, begun[name])}
    assert moved == {name for name in after if "_lora_" in name} | {"head/score"}


# ---- transformers ----------------------------------------------------------------------------------------------------


# RoPE's angles are in float32 here, and norms there, so float64 is compared on GPT-2.
HEADED = [("gpt2", (torch.float32, F64)), ("llama", (torch.float32,)),
          pytest.param("deepseek", (torch.float32,), marks=pytest.mark.slow)]  # fmt: skip


@pytest.mark.parametrize("kind, dtypes", HEADED)
def test_scores_are_those_of_transformers_and_weights_come_back(kind, dtypes, tmp_path):
    transformers = pytest.importorskip("transformers")
    base = models.build(config_of(kind, dropout=0.0))
    for dtype in dtypes:
        exact = 1e-5 if dtype == torch.float32 else 1e-10
        for model in (models.classify(base, LABELS, pad=0), models.reward(base, pad=0)):
            params = models.init_params(model, fzero.random.key(2), dtype)
            folder = tmp_path / f"{dtype}-{len(model.config.labels)}"
            huggingface.save_hf(folder, model.config, params)
            theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
            assert list(theirs.config.id2label.values()) == list(model.config.labels or ["LABEL_0"])
            ids = torch.randint(1, V, (3, T), generator=torch.Generator().manual_seed(0))
            ids[1, 4:] = ids[2, 2:] = 0  # rows of texts of 6, 4 and 2 tokens
            with torch.no_grad():
                expected = theirs(input_ids=ids, attention_mask=(ids != 0).long()).logits
            got = models.logits(model, params, {"tokens": ids}, Ctx(dtype=dtype))[range(3), [5, 3, 1]]
            assert_close(got, expected, rtol=exact, atol=exact * float(expected.abs().max()))
            theirs.save_pretrained(folder / "again")
            config, again = huggingface.load_hf(folder / "again")
            assert (config.labels, config.pad) == (model.config.labels, 0)
            assert all(torch.equal(a, b) for a, b in zip(pytree.leaves(again), pytree.leaves(params)))


@pytest.mark.parametrize("about, message", [
    ({"problem_type": "multi_label_classification"}, "problem_type is 'multi_label_classification'; fzero learns one"),
    ({"id2label": {"1": "a", "2": "b"}}, "id2label is .*; it must name the classes 0, 1"),
    ({"id2label": {"0": "a", "1": "a"}}, "id2label: labels has 'a' twice"),
    ({"architectures": ["LlamaForTokenClassification"]}, "fzero reads .* and those with ForSequenceClassification"),
])  # fmt: skip
def test_a_head_that_fzero_does_not_have_is_one_line(tmp_path, about, message):
    model = models.classify(models.build(config_of("llama", dropout=0.0)), LABELS)
    folder = huggingface.save_hf(tmp_path / "m", model.config, models.init_params(model, fzero.random.key(0)))
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | about))
    with pytest.raises(ValueError, match=message):
        huggingface.load_hf(folder)


def test_what_a_head_refuses_is_one_line():
    base = models.build(config_of("mlp"))
    for make, message in (
        (lambda: models.classify(base, ["a"]), "classify: labels is .*; there must be two"),
        (lambda: models.classify(base, ["a", "a"]), "labels has 'a' twice"),
        (lambda: models.classify(models.reward(base), ["a", "b"]), "has a head of scores already"),
        (lambda: models.reward(base._replace(features=None)), "reward: the model has a loss of its own, as a module"),
        (lambda: models.loss(models.reward(base), models.init_params(models.reward(base), fzero.random.key(0)),
                             {"tokens": torch.zeros(1, 2).long(), "targets": torch.zeros(1, 2).long()}, Ctx()),
         "reward: the batch has no 'documents'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make()

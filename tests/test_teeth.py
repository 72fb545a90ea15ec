"""Planted mistakes, each with the law that must catch it. A mistake that survives means that a law has no teeth."""

from importlib import import_module

import laws
import pytest
import torch
from law_cases import CASES, OPTIMIZERS, case_of
from moe_balance_cases import equals_written_out

from fzero import models, optim
from fzero.core import precision, prng, pytree, stack
from fzero.kernels import attention_arguments, attention_pattern, attention_tiled, cross_entropy, moe
from fzero.models import base, cp_attention, forward, layers
from fzero.optim import leafwise
from fzero.train import gradient, step
from fzero.train.update import InMemoryUpdate, in_memory

# The packages export functions of these names.
gpt2, llama, adamw = (import_module(f"fzero.{name}") for name in ("models.gpt2", "models.llama", "optim.adamw"))

TEETH = {}


def caught_by(*laws_that_catch):
    """Registers a mistake: a function that plants it with monkeypatch. Each law must hold before, and raise
    AssertionError after."""

    def register(plant):
        for name, law in laws_that_catch:
            TEETH[f"{plant.__name__} [{name}]"] = (plant, law)
        return plant

    return register


def micro_batches(case, optimizer="sgd"):
    return f"micro_batches {case}", lambda: laws.micro_batches(case_of(case), OPTIMIZERS[optimizer][0](0.05))


def one_normalisation(case):
    return f"one_normalisation {case}", lambda: laws.one_normalisation(case_of(case))


def donation(case, optimizer):
    return f"donation {optimizer}", lambda: laws.donation(case_of(case), OPTIMIZERS[optimizer][0](0.05))


def transaction(optimizer="adamw", donate=True):
    return f"transaction {optimizer}", lambda: laws.transaction(
        case_of("mlp"), OPTIMIZERS[optimizer][0](0.05), donate=donate
    )


def of_model(law, model):
    return f"{law.__name__} {model}", lambda: law(model)


def remat(model):
    return f"remat {model}", lambda: laws.remat(case_of(model))


MASTER = ("master_weights", lambda: laws.master_weights(precision.bf16()))


def wrap(monkeypatch, owner, name, change):
    """Replaces owner.name by change(the original)."""
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))


def wrong_loss(monkeypatch, change):
    """Plants change(out, first) on what the loss gives for the micro-batch whose first sequence is `first`: of models
    and functions."""

    def streamed(original):
        begins = []

        class Told(original):
            def context(self, batch, key, first):
                begins[:] = [first]
                return original.context(self, batch, key, first)

            def head_forward(self, part, *rest):
                first = begins[0]

                def head(*args):
                    return change(self.model.head(*args), first)

                return original.head_forward(self, part._replace(functions=(head,)), *rest)

        return Told

    wrap(monkeypatch, gradient, "StreamedModel", streamed)
    changed = lambda loss: lambda params, part, key, first: change(loss(params, part, key, first), first)  # noqa: E731
    wrap(monkeypatch, gradient, "functional", lambda f: lambda loss, *rest: f(changed(loss), *rest))


# ---- sums and normalisation ------------------------------------------------------------------------------------------


@caught_by(*(micro_batches(case) for case in CASES))
def doubled_gradient_in_the_second_micro_batch(monkeypatch):
    wrong_loss(monkeypatch, lambda out, first: out._replace(total=2 * out.total - out.total.detach()) if first else out)


@caught_by(*(one_normalisation(case) for case in CASES))
def doubled_gradient_everywhere(monkeypatch):
    wrong_loss(monkeypatch, lambda out, first: out._replace(total=2 * out.total - out.total.detach()))


@caught_by(micro_batches("mlp"), one_normalisation("llama"), one_normalisation("plain function"))
def mean_of_the_micro_batches_means(monkeypatch):
    def local_mean(out, first):
        return out._replace(total=out.total / out.num_tokens.clamp(min=1), num_tokens=torch.ones_like(out.num_tokens))

    wrong_loss(monkeypatch, local_mean)


@caught_by(("weights_are_counts", lambda: laws.weights_are_counts(1e-3)))
def count_of_at_least_one(monkeypatch):
    wrong_loss(monkeypatch, lambda out, first: out._replace(num_tokens=out.num_tokens.clamp(min=1)))


@caught_by(("evaluation llama", lambda: laws.evaluation(case_of("llama"))))
def dropout_in_the_evaluation(monkeypatch):
    def keyed(original):
        class Keyed(original):
            def context(self, batch, key, first):
                return original.context(self, batch, {"key": prng.key(0)}, first)

        return Keyed

    wrap(monkeypatch, gradient, "StreamedModel", keyed)


@caught_by(one_normalisation("mlp"), one_normalisation("gpt2"))
def division_by_positions_in_place_of_tokens(monkeypatch):
    wrong_loss(monkeypatch, lambda out, first: out._replace(num_tokens=out.num_tokens * 0 + 48))


@caught_by(of_model(laws.as_written, "llama"), of_model(laws.as_written, "mlp"))
def mask_forgotten_in_the_loss(monkeypatch):
    wrap(
        monkeypatch,
        forward,
        "linear_cross_entropy",
        lambda f: lambda x, w, t, mask, **o: f(x, w, t, torch.ones_like(mask), **o),
    )


@caught_by(one_normalisation("plain function"))
def scaling_in_place_where_two_leaves_share_a_gradient(monkeypatch):
    monkeypatch.setattr(
        in_memory, "overwrite", lambda change, names, grads, *rest: pytree.map(change, names, grads, *rest)
    )
    # Without this the expanded gradient is refused by torch, before the shared one is seen.
    wrap(monkeypatch, torch.func, "grad", lambda f: lambda *a, **o: lambda *b: expanded(f(*a, **o)(*b)))


def expanded(out):
    return pytree.map(lambda g: g.contiguous(), out[0]), out[1]  # what is shared stays shared


@caught_by(micro_batches("gpt2"), micro_batches("llama"), micro_batches("moe dropless"))
def dropout_without_the_offset_of_the_micro_batch(monkeypatch):
    first = models.TokenLayout()
    wrap(monkeypatch, layers, "masks_of", lambda f: lambda x, name, ctx: f(x, name, ctx._replace(tokens=first)))


@caught_by(micro_batches("moe dropless"))
def balance_loss_of_the_batch_in_place_of_the_sequence(monkeypatch):
    def head(original):
        def built(config):
            model = original(config)

            def mixed(params, x, batch, ctx):
                x = {**x, **{n: x[n].mean(0, keepdim=True).expand(x[n].shape) for n in ("load", "prob")}}
                return model.head(params, x, batch, ctx)

            return model._replace(head=mixed)

        return built

    monkeypatch.setattr(models, "mixtral", head(models.mixtral))


# ---- models ----------------------------------------------------------------------------------------------------------


@caught_by(*(of_model(law, m) for law in (laws.causal, laws.as_written) for m in ("gpt2", "llama", "moe dropless")))
def causal_mask_forgotten(monkeypatch):
    monkeypatch.setattr(attention_pattern.Pattern, "visible", lambda self, query, key: (key >= 0) | (query >= 0))


def everywhere(documents):
    return None if documents is None else torch.zeros_like(documents)


@caught_by(*(of_model(law, m) for law in (laws.documents, laws.as_written) for m in ("gpt2", "llama", "moe dropless")))
def document_mask_forgotten(monkeypatch):
    def forgotten(self):
        return self._replace(**{f: everywhere(x) for f, x in self._asdict().items() if f.endswith("documents")})

    positions = attention_arguments.Positions
    wrap(monkeypatch, positions, "mask", lambda f: lambda self, pattern: f(forgotten(self), pattern))


@caught_by(*(of_model(laws.as_written, m) for m in ("llama", "moe dropless", "moe capacity")))
def layer_norm_in_place_of_rms_norm(monkeypatch):
    def centred(p, x, eps, ctx):
        return layers.layer_norm(x, p["scale"], torch.zeros_like(p["scale"]), eps)

    monkeypatch.setattr(llama, "norm", centred)


@caught_by(of_model(laws.as_written, "llama"), of_model(laws.as_written, "moe dropless"))
def rope_positions_off_by_one_for_keys(monkeypatch):
    def off_by_one(f):
        return lambda q, k, at, *rest, **options: (
            f(q, k, at, *rest, **options)[0],
            f(q, k, at + 1, *rest, **options)[1],
        )

    wrap(monkeypatch, cp_attention, "rope_qk", off_by_one)


@caught_by(of_model(laws.as_written, "llama"))
def rope_scaling_forgotten(monkeypatch):
    wrap(
        monkeypatch,
        cp_attention,
        "rope_frequencies",
        lambda f: lambda k, theta, scaling, *rest: f(k, theta, None, *rest),
    )


@caught_by(of_model(laws.as_written, "gpt2"), of_model(laws.documents, "gpt2"))
def learned_positions_that_do_not_restart(monkeypatch):
    monkeypatch.setattr(gpt2, "document_positions", lambda d: torch.arange(d.shape[-1]).expand(d.shape))


@caught_by(*(of_model(laws.as_written, m) for m in ("moe dropless", "moe capacity")))
def expert_weights_not_renormalised(monkeypatch):
    def route(logits, top_k, **_):
        probabilities = torch.softmax(logits, -1)
        weights, ids = torch.topk(probabilities, top_k, dim=-1)
        return ids, weights, probabilities

    monkeypatch.setattr(moe, "route", route)


@caught_by(("balance moe dropless", lambda: equals_written_out("moe dropless", 4)))
def bias_moved_in_each_micro_batch(monkeypatch):
    seen = []
    wrap(monkeypatch, gradient, "sum_losses", lambda f: lambda losses, *rest: seen.extend(losses) or f(losses, *rest))

    def each(f):
        def move(model, plan, state, tables, *rest, **named):
            parts, seen[:] = [loss.tables for loss in seen], []
            for part in parts:
                state = f(model, plan, state, part, *rest, **named)
            return state

        return move

    wrap(monkeypatch, step, "move_leaves", each)


@caught_by(of_model(laws.as_written, "moe capacity"))
def capacity_forgotten(monkeypatch):
    wrap(
        monkeypatch,
        moe,
        "capacity",
        lambda f: lambda p, x, ids, weights, factor, *rest, **options: f(p, x, ids, weights, 100.0, *rest, **options),
    )


@caught_by(one_normalisation("mlp"), one_normalisation("llama"))
def gradient_of_the_softmax_without_its_target(monkeypatch):
    monkeypatch.setattr(cross_entropy, "_write_targets", lambda *args: None)


@caught_by(*(one_normalisation(case) for case in ("gpt2", "llama", "moe dropless")))
def attention_backward_without_the_normalisation_of_rows(monkeypatch):
    def without(f):
        return lambda q, k, v, sinks, documents, lse, *rest: f(q, k, v, sinks, documents, lse * 0, *rest)

    wrap(monkeypatch, attention_tiled, "_blocked_backward", without)


# ---- remat and streaming ---------------------------------------------------------------------------------------------


@caught_by(remat("mlp"), remat("llama"))
def recomputation_with_another_layer(monkeypatch):
    below = lambda fetch: lambda i: fetch(max(i - 1, 0))  # noqa: E731
    wrap(monkeypatch, stack.LayerLoop, "backward", lambda f: lambda self, fetch, *rest: f(self, below(fetch), *rest))


@caught_by(remat("mlp"), remat("gpt2"))
def residuals_of_the_first_layer_first(monkeypatch):
    class Queue(list):
        def pop(self, at=0):
            return super().pop(at)

    wrap(
        monkeypatch,
        stack.LayerLoop,
        "__init__",
        lambda f: lambda self, *a, **named: f(self, *a, **{**named, "saved": Queue()}),
    )


# ---- optimizers and the state ----------------------------------------------------------------------------------------


@caught_by(donation("mlp", "adamw"), donation("mlp", "adam"))
def bias_correction_missing(monkeypatch):
    monkeypatch.setattr(
        adamw,
        "adam_scalars",
        lambda lr, b1, b2, count, *_: (adamw.lr_at(lr, count), *[torch.ones((), dtype=torch.float64)] * 2),
    )


@caught_by(donation("mlp", "lion"), donation("plain function", "sgd momentum"))
def donated_slots_not_written(monkeypatch):
    rows = lambda f: lambda *trees: [row._replace(slots=tuple(s.clone() for s in row.slots)) for row in f(*trees)]  # noqa: E731
    wrap(monkeypatch, leafwise, "rows_of", rows)
    alike = lambda f: lambda leaves: f([leaf._replace(state=tuple(s.clone() for s in leaf.state)) for leaf in leaves])  # noqa: E731
    wrap(monkeypatch, leafwise, "alike", alike)


@caught_by(donation("mlp", "clip and adamw"))
def clip_left_out_when_donated(monkeypatch):
    wrap(
        monkeypatch,
        in_memory,
        "apply_in_place",
        lambda f: lambda tx, g, *rest: f(tx, pytree.map(lambda x: x * 1e-3, g), *rest),
    )


@caught_by(donation("mlp", "sgd"))
def average_left_out_when_donated(monkeypatch):
    def outer(original):
        def apply(tx, grads, state, *rest):
            before = pytree.map(torch.clone, state.average)
            params, new = original(tx, grads, state, *rest)
            return params, new._replace(average=before)

        return apply

    wrap(monkeypatch, in_memory, "apply_in_place", outer)


def advance_optimizer(original):
    def update(self, grads, state, skipped):
        if not bool(skipped):
            return original(self, grads, state, skipped)
        zeros = type(grads)(*pytree.map(torch.zeros_like, (grads.sums, grads.factor, grads.norm)))
        moved = original(self, zeros, pytree.map(torch.clone, state), torch.tensor(False))
        return state._replace(opt_state=moved.opt_state)

    return update


@caught_by(transaction("adamw"), transaction("clip and adamw"), transaction("muon by label"))
def skipped_step_that_advances_the_optimizer(monkeypatch):
    wrap(monkeypatch, InMemoryUpdate, "donated", advance_optimizer)


@caught_by(transaction("sgd"), transaction("lion", donate=False))
def overflow_not_looked_at(monkeypatch):
    for name in ("donated", "pure"):
        wrap(monkeypatch, InMemoryUpdate, name, lambda f: lambda *args: f(*args[:-1], args[-1] & False))


@caught_by(("overflow mlp", lambda: laws.overflow(case_of("mlp"), donate=True)))
def scale_that_does_not_fall(monkeypatch):
    wrap(
        monkeypatch, step, "update_scaler", lambda f: lambda config, state, overflow: f(config, state, overflow & False)
    )


@caught_by(MASTER)
def master_weights_not_used(monkeypatch):
    def outer(original):
        def update(self, grads, state, skipped):
            narrow = pytree.map(lambda p, m: p.to(m.dtype), state.params, state.master)
            return original(self, grads, state._replace(master=narrow), skipped)

        return update

    for name in ("donated", "pure"):
        wrap(monkeypatch, InMemoryUpdate, name, outer)


@caught_by(("purity mlp", lambda: laws.purity(case_of("mlp"), optim.adamw(0.05))))
def pure_step_that_writes_into_its_input(monkeypatch):
    wrap(monkeypatch, InMemoryUpdate, "pure", lambda f: InMemoryUpdate.donated)


@caught_by(("resume mlp", lambda: laws.resume(case_of("mlp"), optim.adamw(0.05))))
def state_outside_the_state(monkeypatch):
    calls = []

    def outer(original):
        def apply(*args):
            calls.append(1)
            return original(args[0], pytree.map(lambda g: g * (1 + 0.1 * len(calls)), args[1]), *args[2:])

        return apply

    wrap(monkeypatch, in_memory, "apply_in_place", outer)


@caught_by(*(of_model(laws.init_depends_on_names, m) for m in ("gpt2", "llama", "mlp")))
def initial_values_drawn_one_after_the_other(monkeypatch):
    def init_params(model, key, dtype=torch.float32, device="cpu", **_):
        generator = torch.Generator().manual_seed(int(key[0]))
        draw = lambda name, shape, std, mean=0.0: mean + std * torch.randn(shape, generator=generator, dtype=dtype)  # noqa: E731
        return model.init(draw)

    monkeypatch.setattr(base, "init_params", init_params)


@caught_by(("state_layout", lambda: laws.state_layout(case_of("mlp"), optim.adamw(0.05))))
def spec_of_the_second_moment_forgotten(monkeypatch):
    wrap(monkeypatch, leafwise, "moment", lambda f: lambda dtype: f(dtype)._replace(spec=lambda name, spec: ()))


@caught_by(("cost bf16 adamw", lambda: laws.cost(case_of("mlp"), "adamw", precision.bf16())))
def moments_in_another_dtype(monkeypatch):
    wrap(monkeypatch, leafwise, "moment", lambda f: lambda dtype: f(torch.float64))


# Every mistake is planted into one law every time; into the others of those that must catch it, in the slow tier.
FIRST = {name.split(" [")[0]: name for name in reversed(TEETH)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FIRST.values())) for name in TEETH]
)
def test_planted_mistake_is_caught(name, monkeypatch):
    plant, law = TEETH[name]
    law()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        law()

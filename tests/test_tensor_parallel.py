"""Tensor and sequence parallelism of the models: the numbers of one process, Megatron's communication, and mistakes
that must show."""

import contextlib
import importlib
import re
import sys

import pytest
import ranks
import torch
from close import assert_close, assert_same
from law_cases import GEMMA, GPT_OSS, OLMO2

from fzero import models, psum, pvary
from fzero.core import prng, pytree
from fzero.models import base, cp_attention, experts, forward, layers
from fzero.models.batch import check_batch
from fzero.sharding import ActivationSplit, Mesh, Spec, fake_mesh, match_rules, one_process

# The packages' functions of the same names hide these modules.
gpt2, llama, mlp, mixtral = (
    importlib.import_module(f"fzero.models.{name}") for name in ("gpt2", "llama", "mlp", "mixtral")
)
cross_entropy = importlib.import_module("fzero.kernels.cross_entropy")
F64 = torch.float64
B, T, V, D, L, H, F = 3, 8, 16, 8, 2, 4, 12
ODD = 19
SIZES = {"vocab_size": V, "max_len": 16, "d_model": D, "n_layers": L, "d_ff": F, "init_std": 0.5}
HEADS = {**SIZES, "n_heads": H, "dropout": 0.1}
GQA = {**HEADS, "n_kv_heads": 2, "head_dim": 4}  # at tp=4 two ranks share a key/value head
MOE = {**GQA, "n_experts": 3, "top_k": 2, "balance_coef": 0.3, "z_coef": 0.2}
CONFIGS = {
    "gpt2 tied": models.GPT2Config(**HEADS),
    "gpt2": models.GPT2Config(**HEADS, tied=False),
    "llama tied": models.LlamaConfig(**GQA, tied=True, pattern="window:3"),
    "llama": models.LlamaConfig(**GQA),
    "llama, one key/value head": models.LlamaConfig(**{**GQA, "n_kv_heads": 1}),
    "qwen": models.LlamaConfig(**GQA, qkv_bias=True, qk_norm=True),
    "gemma": models.LlamaConfig(**{**GQA, **GEMMA}),
    "olmo2": models.LlamaConfig(**GQA, **OLMO2),
    "moe dropless": models.MoEConfig(**MOE),
    "moe capacity": models.MoEConfig(**MOE, capacity_factor=1.0),
    "gpt-oss": models.MoEConfig(**MOE, **GPT_OSS),
    "mlp": models.MLPConfig(**SIZES),
    # Vocabularies that tp does not divide: the last of 4 ranks has 4 words, of 2 ranks 9.
    "gpt2 odd": models.GPT2Config(**{**HEADS, "vocab_size": ODD}),
    "llama odd": models.LlamaConfig(**{**GQA, "vocab_size": ODD}),
}


VARIATIONS = ("gemma", "olmo2", "gpt-oss", "gpt2 odd", "llama odd")


def batch_of(*, documents=True, mask=True, t=T, words=V):
    """Packed sequences with an uneven mask; the last row counts no token."""
    g = torch.Generator().manual_seed(2)
    tokens, targets = (torch.randint(0, words, (B, t), generator=g) for _ in range(2))
    counts = torch.rand(B, t, generator=g) < 0.6
    counts[-1] = False
    starts = torch.rand(B, t, generator=g) < 0.3
    batch = {"tokens": tokens, "targets": targets, "first": torch.tensor(5)}
    return batch | ({"mask": counts} if mask else {}) | ({"documents": starts.int().cumsum(1)} if documents else {})


def params_of(model):
    """Parameters none of which is at a special value, such as a bias of 0."""
    drawn = pytree.named_leaves(base.init_params(model, prng.key(1), F64))
    moved = {n: x + 0.3 * prng.normal(prng.fold_in(prng.key(2), n), x.shape, dtype=F64) for n, x in drawn.items()}
    return pytree.from_named(moved, base.init_params(model, prng.key(1), F64))


def specs_of(model, params, mesh):
    return {
        n: Spec.parse(text) for n, text in match_rules(model.rules(mesh), list(pytree.named_leaves(params))).items()
    }


def cut(params, specs, tp):
    """This rank's shards, by slicing."""
    local = {}
    for name, leaf in pytree.named_leaves(params).items():
        for dim, axes in enumerate(specs[name].dims):
            if "tp" in axes:
                leaf = leaf.chunk(tp.size, dim)[tp.rank]
        local[name] = leaf.clone()
    return pytree.from_named(local, params)


def fetch(params, specs, tp, sequence):
    """What whoever fetches leaves owes to those that are whole and used differently by each rank: pvary."""
    named = pytree.named_leaves(params)
    owed = {n for n, s in specs.items() if "tp" in s.partial or (sequence and "tp" not in s.axes)}
    return pytree.from_named(
        {n: pvary(x, tp, leaf=f"gradient of {n}") if n in owed else x for n, x in named.items()}, params
    )


def put_together(parts, specs):
    """The whole leaves from those of the ranks; those that are whole on each must have the same bits there."""
    whole = {}
    for name, spec in specs.items():
        leaves = [pytree.named_leaves(part)[name] for part in parts]
        dims = [dim for dim, axes in enumerate(spec.dims) if "tp" in axes]
        if dims:
            whole[name] = torch.cat(leaves, dims[0])
        else:
            for leaf in leaves[1:]:
                assert_same(leaf, leaves[0])
            whole[name] = leaves[0]
    return pytree.from_named(whole, parts[0])


def setting(mesh, name, sequence=False, *, compiled=False):
    """(model, this rank's parameters, f) where f(params, batch) is the loss on this rank, of parameters as cut."""
    model = models.build(CONFIGS[name])
    params = params_of(model)
    specs, tp = specs_of(model, params, mesh), mesh["tp"]
    ctx = base.Ctx(mesh=mesh, dtype=F64, key=prng.key(4), split=ActivationSplit(sequence=sequence), compiled=compiled)

    def f(local, batch):
        return forward.loss(model, fetch(local, specs, tp, sequence), batch, ctx)

    return model, cut(params, specs, tp), f


def results(mesh, name, batch, sequence=False, compiled=False, checked=False):
    """(gradients, Loss) on one rank, or of one process."""
    _, params, f = setting(mesh, name, sequence, compiled=compiled)
    with mesh.checked() if checked else contextlib.nullcontext():
        return torch.func.grad(lambda p: (lambda out: (out.total, out))(f(p, batch)), has_aux=True)(params)


ONE = one_process()


def compare(name, n, *args, fn=results, **options):
    """Assert that `fn` gives on n ranks of tp what it gives on one process."""
    expected = fn(ONE, name, *args, **options)
    got = ranks.run(n, call, fn, name, args, options, mesh={"tp": n})
    specs = specs_of(models.build(CONFIGS[name]), expected[0], fake_mesh({"tp": n}))
    assert_close(put_together([grads for grads, _ in got], specs), expected[0], rtol=1e-10, atol=1e-12)
    for _, out in got:
        assert_same(out, got[0][1])
    assert_close(got[0][1], expected[1], rtol=1e-10)


def call(mesh, fn, name, args, options):
    return fn(mesh, name, *args, **options)


# ---- parallel = serial ----------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("sequence", (False, True), ids=("", "sequence"))
@pytest.mark.parametrize("n", (2, 4))
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in VARIATIONS])
def test_loss_and_gradients_are_those_of_one_process(name, n, sequence):
    compare(name, n, batch_of(), sequence, checked=n == 2)


@pytest.mark.parametrize("n, sequence", [(2, False), (2, True), (4, False)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name == "gpt-oss" else pytest.mark.slow)
        for name in VARIATIONS
    ],
)
def test_of_variations_too(name, n, sequence):
    compare(name, n, batch_of(), sequence, checked=n == 2)


def test_a_bias_after_a_product_that_ranks_sum_is_added_once():
    compare("gpt-oss", 2, batch_of(), True, checked=True)


@pytest.mark.parametrize("name, n, sequence", [("gpt2 odd", 2, False), ("llama odd", 4, True)])
def test_of_words_that_tp_does_not_divide(name, n, sequence):
    batch = batch_of(words=ODD)
    batch["tokens"][0, :2] = batch["targets"][0, :2] = torch.tensor([ODD - 1, -(-ODD // n)])  # the last rank's
    batch["mask"][0, :2] = True
    compare(name, n, batch, sequence, checked=n == 2)


@pytest.mark.parametrize("sequence", (False, True), ids=("", "sequence"))
@pytest.mark.parametrize("name", ("gpt2 tied", "moe capacity"))
def test_without_documents_and_mask(name, sequence):
    compare(name, 2, batch_of(documents=False, mask=False), sequence)


def eager_and_compiled(mesh, name, batch, sequence):
    """(gradients, Loss, rows of the ledger) on one rank, both ways."""
    out = []
    for compiled in (False, True):
        mesh.ledger.clear()
        out.append((*results(mesh, name, batch, sequence, compiled), mesh.ledger.rows()))
    return out


@pytest.mark.exhaustive
def test_a_compiled_block_gives_the_same_numbers_by_the_same_communication():
    """Nor does its backward pass repeat a collective of the forward pass."""
    for (grads, out, rows), compiled in ranks.run(
        2, call, eager_and_compiled, "gpt2 tied", (batch_of(), True), {}, mesh={"tp": 2}
    ):
        assert_close(compiled[0], grads, rtol=1e-10, atol=1e-12)
        assert_close(compiled[1], out, rtol=1e-10)
        assert sorted(compiled[2]) == sorted(rows)


def higher(mesh, name, batch, sequence=False):
    """(grad of the gradient's square, Hessian times vector), beside per-example gradients."""
    model, params, f = setting(mesh, name, sequence)
    specs = specs_of(model, params, mesh)

    def total(p, rows=batch):
        return f(p, rows).total

    def square(p):
        named = pytree.named_leaves(torch.func.grad(total)(p))
        sharded = sum((g**2).sum() for n, g in named.items() if "tp" in specs[n].axes)
        return psum(sharded, mesh["tp"]) + sum((g**2).sum() for n, g in named.items() if "tp" not in specs[n].axes)

    tangent = pytree.map(torch.cos, params)
    loss_tangent, hvp = torch.func.jvp(lambda p: torch.func.grad_and_value(total)(p)[::-1], (params,), (tangent,))[1]
    rows = {n: x[:, None] for n, x in batch.items() if n != "first"}
    each = torch.func.vmap(torch.func.grad(total), (None, 0))(params, rows)
    trees = {"grad of grad": torch.func.grad(square)(params), "hvp": hvp}
    trees |= {f"example {i}": pytree.map(lambda g, i=i: g[i], each) for i in range(B - 1)}
    return trees, loss_tangent


@pytest.mark.parametrize("name, n, sequence", [("llama tied", 4, False), ("moe dropless", 2, True), ("gpt2", 2, True)])
def test_higher_derivatives_and_per_example_gradients(name, n, sequence):
    expected, expected_tangent = higher(ONE, name, batch_of(), sequence)
    got = ranks.run(n, call, higher, name, (batch_of(), sequence), {}, mesh={"tp": n})
    specs = specs_of(models.build(CONFIGS[name]), expected["hvp"], fake_mesh({"tp": n}))
    for key, tree in expected.items():
        assert_close(put_together([trees[key] for trees, _ in got], specs), tree, rtol=1e-9, atol=1e-10)
    for _, tangent in got:
        assert_close(tangent, expected_tangent, rtol=1e-10)


def all_logits(mesh, name, batch, sequence=False):
    """(gradient of a sum of the logits, logits)."""
    model, params, _ = setting(mesh, name)
    specs, tp = specs_of(model, params, mesh), mesh["tp"]
    ctx = base.Ctx(mesh=mesh, dtype=F64, split=ActivationSplit(sequence=sequence))

    def f(p):
        logits = forward.logits(model, fetch(p, specs, tp, sequence), batch, ctx)
        return (logits * torch.arange(logits.shape[-1], dtype=F64)).sum(), logits

    return torch.func.grad(f, has_aux=True)(params)


@pytest.mark.parametrize(
    "name, n, sequence",
    [
        ("gpt2 tied", 4, False),
        ("llama", 2, True),
        ("qwen", 4, True),
        ("mlp", 4, False),
        ("moe dropless", 2, False),
        ("gpt2 odd", 4, False),
    ],
)
def test_logits(name, n, sequence):
    compare(name, n, batch_of(), sequence, fn=all_logits)


# ---- communication --------------------------------------------------------------------------------------------------


def volumes(mesh, name, sequence):
    """{(phase, what, collective): (calls, elements)} of one forward and one backward pass."""
    _, params, f = setting(mesh, name, sequence)
    with mesh.ledger.phase("forward"):
        total, vjp = torch.func.vjp(lambda p: f(p, batch_of()).total, params)
    with mesh.ledger.phase("backward"):
        vjp(torch.ones_like(total))
    return {(r.phase, r.leaf, r.collective): (r.calls, r.elements) for r in mesh.ledger.rows()}


@pytest.mark.each_value
@pytest.mark.parametrize("sequence", (False, True), ids=("", "sequence"))
@pytest.mark.parametrize("n", (2, 4))
@pytest.mark.parametrize("name", ("gpt2 tied", "llama", "moe dropless"))
def test_a_layer_communicates_what_megatron_s_does(name, n, sequence):
    """Shoeybi et al. 2019, section 3: two all-reduces of [B, T, D] in each pass of a layer; Korthikanti et al. 2022,
    section 4.2.2: two all-gathers and two reduce-scatters, as many bytes. Key/value heads that ranks share add nothing
    to that, and routing a little."""
    got = ranks.run(n, volumes, name, sequence, mesh={"tp": n})[0]
    x, top_k, n_experts = (n - 1) * B * T * D // n, 2, 3
    enters = (
        {"forward": {"all_gather": x}, "backward": {"psum_scatter": x}} if sequence else {"backward": {"psum": 2 * x}}
    )
    leaves = (
        {"forward": {"psum_scatter": x}, "backward": {"all_gather": x}} if sequence else {"forward": {"psum": 2 * x}}
    )

    expected = {}

    def add(what, calls, *passes):
        for one in passes:
            for phase, collectives in one.items():
                expected.update(
                    {(phase, what, kind): (calls, calls * elements) for kind, elements in collectives.items()}
                )

    add("blocks/attn", L, enters, leaves)
    add("blocks/moe" if "moe" in name else "blocks/mlp", L, enters, leaves)
    add("embed/tokens", 1, leaves)
    add("head", 1, enters)
    # Of each token two numbers: the log-sum-exp of the logits here, and the target's logit.
    calls, elements = expected.get(("forward", "head", "all_gather"), (0, 0))
    expected["forward", "head", "all_gather"] = (calls + 1, elements + (n - 1) * B * T * 2)
    if "moe" in name:
        routing = (n - 1) * B * T * top_k // n
        both = {"forward": {"all_gather": 2 * routing, "psum": -(-2 * (n - 1) * B * (2 * n_experts + 2) // n)}}
        both |= {"backward": {"psum_scatter": 2 * routing}}
        add("blocks/moe/router", L, both if sequence else {"backward": {"psum": 2 * routing}})
    activations = {key: value for key, value in got.items() if not key[1].startswith("gradient of ")}
    assert activations == expected
    # The rest is the sums that the fetch of a leaf owes.
    owed = {key for key in got if key not in activations}
    whole = (
        {leaf for leaf in leaves_of(name) if re.search("norm|/ln_|/b_o|positions|router", leaf)} if sequence else set()
    )
    shared = {"blocks/attn/w_k", "blocks/attn/w_v"} if name != "gpt2 tied" and n == 4 else set()
    assert owed == {("backward", f"gradient of {leaf}", "psum") for leaf in whole | shared}


def leaves_of(name):
    return set(pytree.named_leaves(models.build(CONFIGS[name]).init(lambda name, shape, std, mean=0.0: name)))


# ---- mistakes -------------------------------------------------------------------------------------------------------


def other_rank(axis):
    return axis._replace(rank=axis.size - 1 - axis.rank) if axis.size > 1 else axis


def other_ranks(ctx):
    return ctx._replace(mesh=Mesh(tuple(map(other_rank, ctx.mesh.axes))))


def of_another_rank(f):
    return lambda w, batch, ctx, words: f(w, batch, other_ranks(ctx), words)


def nothing(f):
    return lambda x, *args, **kwargs: x


# what: (model, sequence parallelism, module, name in it, what is made of the function there)
MISTAKES = {
    "a region is entered without pvary": ("mlp", False, layers, "pvary", nothing),
    "a bias is added by each rank": (
        "gpt2",
        False,
        cp_attention,
        "row_parallel_linear",
        lambda f: lambda y, w, ctx, leaf, b=None: layers.exit_region(layers.linear(y, w, b), ctx, leaf),
    ),
    "the embedding's rows are another rank's": ("mlp", False, mlp, "embed_tokens", of_another_rank),
    "the targets' columns are another rank's": (
        "mlp",
        False,
        cross_entropy,
        "Terms",
        lambda f: lambda z, s, c, first, n: f(z, s, c, (first + n // 4) % n, n),
    ),
    "a key/value head is another rank's": (
        "llama",
        False,
        cp_attention,
        "narrow_part",
        lambda f: lambda x, i, n, dim: f(x, n - 1 - i, n, dim),
    ),
    "the gradient of a head's norm is of one rank's heads": (
        "qwen",
        False,
        llama,
        "HEAD_NORM_RULE",
        lambda rule: (rule[0], "[L/pp, K]"),
    ),
    "the positions are another rank's": (
        "gpt2",
        True,
        gpt2,
        "local_tokens",
        lambda f: lambda x, ctx: f(x, other_ranks(ctx)),
    ),
    "a range is dropped out as another": (
        "gpt2",
        True,
        layers,
        "sequence_axis",
        lambda f: lambda ctx: other_rank(f(ctx)),
    ),
    "routing weights enter without pvary": (
        "moe dropless",
        False,
        mixtral,
        "enter_routing",
        lambda f: lambda ids, w, ctx: (ids, w),
    ),
    "statistics are of one range": ("moe dropless", True, experts, "psum", nothing),
    "whole leaves owe nothing": ("llama", True, sys.modules[__name__], "pvary", nothing),
}


def mistaken(mesh, what):
    name, sequence, module, attribute, change = MISTAKES[what]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, attribute, change(getattr(module, attribute)))
        return results(mesh, name, batch_of(), sequence)


@pytest.mark.parametrize(
    "what", [pytest.param(m, marks=[pytest.mark.slow] * (i % 4 > 0)) for i, m in enumerate(MISTAKES)]
)
def test_a_mistake_shows(what):
    name, *_ = MISTAKES[what]
    expected = results(ONE, name, batch_of())
    got = ranks.run(4, mistaken, what, mesh={"tp": 4})
    specs = specs_of(models.build(CONFIGS[name]), expected[0], fake_mesh({"tp": 4}))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_close(put_together([grads for grads, _ in got], specs), expected[0], rtol=1e-3, atol=1e-3)


# ---- what does not divide -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, tp, message",
    [
        (
            models.GPT2Config(**HEADS),
            3,
            "blocks/attn/w_q: dim 2 has 4 heads (n_heads), not divisible by tp=3; use tp in {1, 2, 4} or",
        ),
        (
            models.LlamaConfig(**GQA),
            8,
            "blocks/attn/w_q: dim 2 has 4 heads (n_heads), not divisible by tp=8; use tp in {1, 2, 4} or",
        ),
        (
            models.LlamaConfig(**{**GQA, "n_heads": 12, "n_kv_heads": 3}),
            2,
            (
                "blocks/attn/w_k: dim 2 has 3 heads (n_kv_heads), not divisible by tp=2; use tp in {1, 3, 6} or change "
                "n_kv_heads to 4"
            ),
        ),
        (
            models.GPT2Config(**{**HEADS, "d_ff": 13}),
            2,
            "blocks/mlp/w_in: dim 2 has size 13, not divisible by tp=2; use tp in {1} or pad d_ff to 14",
        ),
        (
            models.MoEConfig(**{**MOE, "d_ff": 6}),
            4,
            "blocks/moe/w_gate: dim 3 has size 6, not divisible by tp=4; use tp in {1, 2} or pad d_ff to 8",
        ),
        (
            models.MLPConfig(**{**SIZES, "d_ff": 14}),
            4,
            "blocks/w_in: dim 2 has size 14, not divisible by tp=4; use tp in {1, 2} or pad d_ff to 16",
        ),
        (
            models.LlamaConfig(**{**GQA, "vocab_size": 5}),
            4,
            (
                "embed/tokens: dim 0 has size 5, too small to give each rank of tp=4 its words; use tp in {1, 2} or "
                "pad vocab_size to 8"
            ),
        ),
    ],
    ids=("heads", "few heads", "key/value heads", "d_ff", "experts", "mlp", "vocabulary"),
)
def test_what_tp_does_not_divide_is_named(config, tp, message):
    model = models.build(config)
    assert model.rules(ONE)
    with pytest.raises(ValueError, match=re.escape(message)):
        model.rules(fake_mesh({"tp": tp}))


def test_key_value_heads_are_sharded_or_shared():
    model = models.build(CONFIGS["llama"])
    for tp, text in ((1, "[·/pp, ·, ·/tp]"), (2, "[·/pp, ·, ·/tp]"), (4, "[·/pp, ·, ·] +tp")):
        specs = specs_of(model, params_of(model), fake_mesh({"tp": tp}))
        assert str(specs["blocks/attn/w_k"]) == str(specs["blocks/attn/w_v"]) == text
        assert str(specs["blocks/attn/w_q"]) == "[·/pp, ·, ·/tp]"


def test_sequence_parallelism_refuses_a_length_that_tp_does_not_divide():
    model = models.build(CONFIGS["mlp"])
    ctx = base.Ctx(mesh=fake_mesh({"tp": 2}), split=ActivationSplit(sequence=True))
    with pytest.raises(ValueError, match=r"the sequences have 7 tokens, not divisible by tp=2; use 8"):
        check_batch(model.config, batch_of(t=7), forward.sequence_parts(ctx))
    check_batch(model.config, batch_of(t=7), forward.sequence_parts(ctx._replace(split=ActivationSplit())))
    check_batch(model.config, batch_of(), forward.sequence_parts(ctx))


def test_on_one_process_sequence_parallelism_is_nothing():
    assert_same(results(ONE, "moe dropless", batch_of(), True), results(ONE, "moe dropless", batch_of()))

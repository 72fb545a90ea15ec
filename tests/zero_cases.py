"""Training on a mesh, for the tests: the same steps on one process and on many, and the whole state put together
again."""

import functools

import torch
from close import assert_close
from law_cases import FP64, case_of, config_of, step_options

import fzero
from fzero import all_gather, local_batch, models, optim, state_specs
from fzero.core import pytree
from fzero.sharding import gather_full, gather_layers

# What tp=4 and dp=4 divide: 4 heads, 2 kv heads (fewer than tp=4), vocabulary 20, T = 8.
SIZES = {"vocab_size": 20, "d_model": 8, "n_heads": 4, "d_ff": 16, "n_layers": 3}
MODELS = {
    "gpt2": {"tied": True},
    "llama": {"n_kv_heads": 2, "tied": False},
    "moe dropless": {"n_kv_heads": 2, "n_experts": 3},
    "moe capacity": {"n_kv_heads": 2},
    "gpt-oss": {"n_kv_heads": 2, "n_experts": 4, "n_layers": 4},
    "gemma": {"n_kv_heads": 2, "n_layers": 4},
    "deepseek": {},
    "encoder and decoder": {},
}
STEPS = 3


@functools.cache
def model_of(name, **changes):
    if name == "qlora":
        sizes = {**SIZES, "d_model": 32, "d_ff": 32, "n_kv_heads": 4, **changes}  # tp cuts between blocks of 16
        return models.lora(models.quantized(models.build(config_of("llama", **sizes)), "nf4", 16), rank=2)
    if name == "random-ltd":  # 8 tokens a row, of which layers in the middle compute 5
        return models.random_ltd(
            models.build(config_of("llama", **{**SIZES, "n_layers": 4, "n_kv_heads": 2, **changes})), 5
        )
    if name == "layer-drop":  # as it is after many steps: the last of the four layers is in 44% of them
        return models.layer_drop(
            models.build(config_of("llama", **{**SIZES, "n_layers": 4, "n_kv_heads": 2, **changes})), 0.25, 100.0
        )
    if name == "lora":
        return models.lora(models.build(config_of("llama", **{**SIZES, "n_kv_heads": 2, **changes})), rank=2)
    if name == "encoder and decoder":
        return case_of(name, **{size: SIZES[size] for size in ("vocab_size", "d_model", "d_ff", "n_layers")}).loss_fn
    return case_of(name, **{**SIZES, **MODELS[name], **changes}).loss_fn


def batch_for(step, rows, length=8):
    """A global batch with an uneven mask; for the second half of the rows no token counts, but for the last row."""
    g = torch.Generator().manual_seed(step)
    tokens, targets = (torch.randint(0, SIZES["vocab_size"], (rows, length), generator=g) for _ in range(2))
    mask = torch.rand(rows, length, generator=g) < 0.7
    mask[rows // 2 : -1] = False
    return {"tokens": tokens, "targets": targets, "mask": mask}


def packed_batch_for(step, rows, length=8):
    """`batch_for` with documents of a few tokens each, other ones in each row."""
    g = torch.Generator().manual_seed(1000 + step)
    starts = torch.rand(rows, length, generator=g) < 0.4
    return {**batch_for(step, rows, length), "documents": starts.cumsum(1)}


MATRICES = {"muon": optim.muon(1e-2, ns_dtype=torch.float64), "adamw": optim.adamw(1e-2, eps=1e-5)}
OPTIMIZERS = {
    "muon": optim.by_label(MATRICES, ((r"^blocks/.*/w_", "muon"), (".*", "adamw"))),
    # Five steps of 0.3 multiply rounding by up to 300 million, of 2e-3 by a few thousand (test_zero.py).
    "sgd": optim.sgd(2e-3),
    "small sgd": optim.sgd(5e-4),
    "adam": optim.adam(1e-2, eps=1e-5),
    "clipped adam": optim.chain(optim.clip_by_global_norm(0.5), optim.adam(1e-2, eps=1e-5)),
    "small clipped adam": optim.chain(optim.clip_by_global_norm(0.5), optim.adam(2e-3, eps=1e-5)),
}


def train(
    mesh,
    name,
    optimizer,
    stage,
    micro_batches,
    *,
    plan_options=None,
    experts="auto",
    steps=STEPS,
    policy=FP64,
    rows=24,
    dropout=0.0,
    sizes=None,
    batches=batch_for,
    **options,
):
    """(the state of this rank, its specs, metrics) after some steps; optimizer: a name of OPTIMIZERS or a
    transformation; `micro_batches` in the whole of the global batch."""
    model = model_of(name, dropout=dropout, **(sizes or {}))
    plan = fzero.zero_plan(stage, model, mesh, **(plan_options or {}), policy=policy).with_experts(experts)
    tx = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    local = micro_batches // mesh.data_size
    state = fzero.init_state(model, tx, plan, seed=3)
    step = fzero.make_train_step(model, tx, plan, micro_batches=local, **step_options(options))
    log = []
    for i in range(steps):
        state, metrics = step(state, local_batch(batches(i, rows), mesh, local))
        log.append([float(x) for x in (metrics.loss, metrics.num_tokens, metrics.grad_norm)])
    return state, state_specs(plan, tx), log


def whole_leaf(leaf, spec, mesh, lead=0):
    """The leaf that the ranks' shards make up, with `lead` dims in front of those of the spec."""
    if spec.rows:
        assert not lead
        leaf, spec = gather_layers(leaf, spec, mesh), fzero.Spec(((), *spec.dims[1:]), parts=spec.parts)
    if spec.parts:
        return gather_full(leaf, spec, mesh)
    for dim, axes in enumerate(spec.dims):
        for axis in reversed(axes):
            leaf = all_gather(leaf, mesh[axis], lead + dim)
    return leaf


def whole(state, specs, mesh):
    """The state of one process that the ranks' states make up."""
    named = pytree.named_leaves(specs)
    return pytree.map_named(lambda name, leaf: whole_leaf(leaf, named[name], mesh), state)


def trained_whole(mesh, cases):
    """On each rank: [(whole state, metrics) of each case]; rank 0's are returned, the others' must be the same."""
    out = []
    for case, options in cases:
        state, specs, log = train(mesh, *case, **options)
        out.append((whole(state, specs, mesh), log))
    return out


def expect_one_process(results, expected, words):
    """Fail unless the ranks of `trained_whole` have the states and metrics of one process.

    results: by rank, what `trained_whole` returned. expected: (state, metrics) of one process for each case; words:
    what each case is, for the message.
    """
    for (state, log), (alone, alone_log), said in zip(results[0], expected, words, strict=True):
        try:
            assert_close(log, alone_log, rtol=1e-10, atol=1e-12)
            assert_close(state.params, alone.params, rtol=1e-10, atol=1e-10)
            assert_close(state.opt_state, alone.opt_state, rtol=1e-8, atol=1e-10)
        except AssertionError as error:
            error.add_note(str(said))
            raise
    assert all([log for _, log in result] == [log for _, log in results[0]] for result in results)

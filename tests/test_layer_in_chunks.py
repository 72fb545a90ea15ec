"""A layer in chunks of the sequence is the layer: its numbers for every option, on a mesh and on a GPU, where two
chunks of keys and values at most stand beside its own; and what is not done in chunks is refused by name."""

import dataclasses
import gc
import weakref

import pytest
import ranks
import torch
import zero_cases as zero
from close import assert_close, assert_same
from pretend_gpu import pretend

from fzero import models
from fzero.core import prng, pytree
from fzero.models import Cache, Ctx, TokenLayout, chunked_layer
from fzero.planner import device_for, plan
from fzero.planner.step_trace import make_trace, run_step
from fzero.run import build
from fzero.sharding import one_process

F64 = torch.float64
T, CHUNK = 37, 8
SIZES = {"vocab_size": 31, "max_len": 64, "d_model": 16, "n_layers": 2, "n_heads": 4, "d_ff": 24, "init_std": 0.3}
LLAMA = models.LlamaConfig(**SIZES, n_kv_heads=2)
GEMMA = {"tied": True, "qk_norm": True, "norms": "both", "norm_offset": True, "score_cap": 2.0, "activation": "gelu"}
CASES = {
    "grouped heads": LLAMA,
    "patterns": dataclasses.replace(LLAMA, pattern="window:11,local:7,strided:5", n_layers=3),
    "options of Gemma": dataclasses.replace(LLAMA, **GEMMA),
    "sinks and biases": dataclasses.replace(LLAMA, sinks=True, qkv_bias=True, out_bias=True, mlp_tokens=3),
    "dropout": dataclasses.replace(LLAMA, dropout=0.2),
    "gpt2": models.GPT2Config(**SIZES, dropout=0.2),
}


def batch_of(documents=True, rows=2):
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 31, (rows, T + 1), generator=g)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    return batch | ({"documents": (torch.rand(rows, T, generator=g) < 0.1).cumsum(-1).int()} if documents else {})


def ctx_of(dtype=F64, **options):
    return Ctx(dtype=dtype, key=prng.key(3), **options)


def passes(config, tokens, batch, dtype=F64):
    """(gradients, loss) of the model whose layers take so many tokens at a time."""
    model = models.build(dataclasses.replace(config, layer_tokens=tokens))
    params = models.init_params(model, prng.key(0), dtype)
    return torch.func.grad_and_value(lambda p: models.loss(model, p, batch, ctx_of(dtype)).total)(params)


@pytest.mark.parametrize("documents", (False, True), ids=("whole", "documents"))
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_layer(name, documents):
    batch = batch_of(documents)
    assert_close(passes(CASES[name], CHUNK, batch), passes(CASES[name], 0, batch), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_its_error_is_at_most_twice_that_of_the_whole_layer(dtype):
    """Of all gradients together, against float64."""
    config, batch = dataclasses.replace(LLAMA, mlp_tokens=3), batch_of()
    model = models.build(config)
    params = pytree.map(lambda leaf: leaf.to(dtype), models.init_params(model, prng.key(0), F64))

    def gradients(tokens, dtype):
        model = models.build(dataclasses.replace(config, layer_tokens=tokens))
        given = pytree.map(lambda leaf: leaf.to(dtype), params)
        grads = torch.func.grad(lambda p: models.loss(model, p, batch, ctx_of(dtype)).total)(given)
        return torch.cat([leaf.double().flatten() for leaf in pytree.leaves(grads)])

    exact = gradients(0, F64)
    whole, chunked = (float((gradients(tokens, dtype) - exact).norm()) for tokens in (0, CHUNK))
    assert 0 < chunked <= 2 * whole


def test_gradients_of_parameters_are_summed_in_float32():
    """Of 300 chunks of equal tokens, which a sum in bfloat16 does not come to."""
    config = dataclasses.replace(LLAMA, max_len=600, n_layers=1, pattern="window:1", out_bias=True)
    batch = dict.fromkeys(("tokens", "targets"), torch.full((1, 600), 7))
    whole, chunked = (passes(config, tokens, batch, torch.bfloat16)[0]["blocks"]["attn"]["b_o"] for tokens in (0, 2))
    assert_close(chunked, whole, rtol=0.02, atol=0)


def test_under_other_transforms_and_with_a_cache_all_tokens_are_taken_at_once():
    batch, results = batch_of(False), []
    for tokens in (0, CHUNK):
        model = models.build(dataclasses.replace(LLAMA, layer_tokens=tokens))
        params = models.init_params(model, prng.key(0), F64)

        def loss(p, row, model=model):
            return models.loss(model, p, {name: x[None] for name, x in row.items()}, ctx_of()).total

        by_row = torch.vmap(torch.func.grad(loss), (None, 0))(params, batch)
        p = pytree.map(lambda leaf: leaf[0], params["blocks"])
        x = torch.randn(1, T, 16, dtype=F64, generator=torch.Generator().manual_seed(1))
        keys, values = torch.zeros(2, 1, T, 2, 4, dtype=F64)
        cache = Cache((keys, values), torch.arange(T), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, T]))
        ctx = ctx_of(cache=cache, tokens=TokenLayout(positions=torch.arange(T)))
        results.append((by_row, model.block(p, x, ctx), cache.pages))
    assert_same(results[1], results[0])


def test_a_graph_is_gone_back_through_twice():
    model = models.build(dataclasses.replace(LLAMA, layer_tokens=CHUNK))
    p = pytree.map(lambda leaf: leaf[0].requires_grad_(), models.init_params(model, prng.key(0), F64)["blocks"])
    out = model.block(p, torch.ones(1, T, 16, dtype=F64), ctx_of()).square().sum()
    once, twice = (torch.autograd.grad(out, pytree.leaves(p), retain_graph=True) for _ in range(2))
    assert_same(once, twice)
    with pytest.raises(NotImplementedError, match="a layer in chunks"):
        torch.autograd.grad(torch.autograd.grad(out, p["attn"]["w_q"], create_graph=True)[0].sum(), p["attn"]["w_q"])


# ---- steps ----------------------------------------------------------------------------------------------------------

PACKED = {"batches": zero.packed_batch_for, "dropout": 0.1}


def case(name, stage=0, *, tokens=3, **options):
    sizes = {"layer_tokens": tokens, **options.pop("sizes", {})}
    return (name, "adam", stage, 2), {**PACKED, "sizes": sizes, **options}


STEPS = {
    "remat full": case("llama", remat="full"),
    "every:2, kept on the host": case("llama", remat="every:2"),
    "gpt2": case("gpt2"),
    "lora": case("lora"),
    "qlora": case("qlora", dropout=0.0),
    "layer drop": case("layer-drop"),
}


def alone(cases):
    """What steps with whole layers make of the cases, on one process, where a stage is nothing: once for cases that
    differ in the stage."""
    whole = [
        ((name, tx, 0, micro), {**options, "sizes": {**options["sizes"], "layer_tokens": 0}})
        for (name, tx, _, micro), options in cases
    ]
    different = {str(case): case for case in whole}
    results = dict(zip(different, zero.trained_whole(one_process(), list(different.values()))))
    return [results[str(case)] for case in whole]


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_those_of_whole_layers(name):
    zero.expect_one_process([zero.trained_whole(one_process(), [STEPS[name]])], alone([STEPS[name]]), [name])


MESHES = {
    "dp2": ({"dp": 2}, [case("llama", stage, remat="full") for stage in range(4)]),
    "tp2": ({"tp": 2}, [case(name, stage) for name, stage in (("llama", 0), ("gpt2", 3))]),
    "pp2": ({"pp": 2}, [case("llama", sizes={"n_layers": 4})]),
}


@pytest.mark.parametrize("name", ["dp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tp2", "pp2"))])
def test_on_a_mesh_too(name):
    mesh, cases = MESHES[name]
    zero.expect_one_process(ranks.run(2, zero.trained_whole, cases, mesh=mesh), alone(cases), cases)


# ---- on a GPU -------------------------------------------------------------------------------------------------------

D, HEAD, LAYERS = 64, 16, 2
WIDE = {"vocab_size": 32, "max_len": 512, "d_model": D, "n_layers": LAYERS, "n_heads": D // HEAD, "n_kv_heads": 1}


def gpu_config(tokens, length, *, remat="full", offload="acts=host", policy="fp32"):
    """That of a step over one row on an H200, of layers that take so many tokens at a time."""
    settings = {f"model.{name}": size for name, size in {**WIDE, "d_ff": 96, "layer_tokens": tokens}.items()}
    settings |= {"data.seq_len": length, "train.batch": 1, "train.micro_batch": 1, "train.remat": remat}
    settings |= {"train.kernels": "reference,attention=blocked", "train.compiled": False, "train.measure_every": 0}
    return plan.config_for("llama-tiny", {**settings, "precision.policy": policy, "offload": offload})


def on_device(config, device, seen=None):
    """The loss and the norm of a second step; of `seen` the waits and the peak are of that one alone."""
    job = build.build(config, one_process(), device=device)
    drawn = torch.randint(0, 32, (1, config.data.seq_len + 1), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": drawn[:, :-1], "targets": drawn[:, 1:], "documents": torch.zeros_like(drawn[:, 1:]).int()}
    batch = {name: x.contiguous().to(device) for name, x in batch.items()}
    short = {name: x[:, :4].contiguous() for name, x in batch.items()}
    state, _ = job.train_step(build.first_state(job), short)  # the first step waits
    if seen is not None:
        gc.collect()
        seen.forget()
    _, metrics = job.train_step(state, batch)
    return metrics.loss, metrics.grad_norm


def on_gpu(config):
    """(peak, loss and norm) on the pretend GPU, whose order and waits are checked."""
    with pretend() as seen:
        found = on_device(config, torch.device("cuda", 0), seen)
        peak, waits, unpinned = seen.peak, dict(seen.waits), dict(seen.unpinned)
        assert seen.peak_ahead == peak  # however far the host runs ahead
        losses = [float(x) for x in found]
        gc.collect()
    # The update asks whether the step is skipped, as PyTorch's AdamW has no form for that.
    assert {line.partition(":")[0] for _, line in waits} == {"train/update/in_memory.py"}
    assert not unpinned and not seen.races and not seen.freed
    return peak, losses


def planned(config):
    """(peak, most bytes in the host's memory) of the plan of a step."""
    found = run_step(config, {}, 0, device_for("h200").target)
    return make_trace(found).peak.bytes, found.host_peak


@pytest.mark.parametrize("remat", ("full", pytest.param("none", marks=pytest.mark.slow)))
def test_a_step_on_a_gpu_waits_for_nothing_and_has_the_bits_of_the_cpu(remat):
    config = gpu_config(16, 40, remat=remat, offload="acts=host" if remat == "full" else "")
    assert on_gpu(config)[1] == [float(x) for x in on_device(config, torch.device("cpu"))]


def test_what_is_as_long_as_the_sequence_on_a_gpu():
    """By the plan, which a GPU confirms: x, the one that comes next, its gradient and that of the result, and some
    numbers a token of the batch. In the host's memory: inputs of layers, and of one its keys, values and results."""
    (short, _), (long, _) = (planned(gpu_config(48, length)) for length in (96, 192))
    assert 3 * 4 * D < (long - short) / 96 <= 4 * 4 * D + 96
    config = gpu_config(48, 144)
    peak, away = planned(config)
    assert peak == pytest.approx(on_gpu(config)[0], rel=1e-3)
    assert away == 144 * 4 * (LAYERS * D + 2 * HEAD + D + D // HEAD)
    assert peak < 0.7 * planned(gpu_config(0, 144))[0]


def test_two_chunks_of_keys_and_values_stand_beside_their_own(monkeypatch):
    brought, counts, copy_in = [], [], chunked_layer.copy_in

    def counted(x, device, **options):
        copied = copy_in(x, device, **options)
        if x.shape[2:] == (1, HEAD) and x.dtype == torch.bfloat16:  # not sums of gradients
            brought.append(weakref.ref(copied.tensor))
            counts.append(sum(ref() is not None for ref in brought))
        return copied

    monkeypatch.setattr(chunked_layer, "copy_in", counted)
    on_gpu(gpu_config(16, 80, policy="bf16"))
    assert max(counts) == 4 and len(counts) == 3 * LAYERS * 2 * 10  # passes, layers, k and v, pairs


def test_chunks_that_no_query_sees_are_not_brought(monkeypatch):
    pairs = []
    kind = chunked_layer.ChunkAttention
    attend = kind.forward
    monkeypatch.setattr(
        chunked_layer.ChunkAttention,
        "forward",
        lambda own, *a: pairs.append((a[3] // 8, a[4] // 8)) or attend(own, *a),
    )
    passes(dataclasses.replace(LLAMA, pattern="window:9", n_layers=1), CHUNK, batch_of())
    assert pairs == [(0, 0), (1, 1), (1, 0), (2, 2), (2, 1), (3, 3), (3, 2), (4, 4), (4, 3)]


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_what_is_not_done_in_chunks_is_refused():
    model = models.build(dataclasses.replace(LLAMA, layer_tokens=CHUNK))
    params, batch = models.init_params(model, prng.key(0), F64), batch_of()
    with pytest.raises(ValueError, match="layer_tokens is 8, and the block is traced into a graph; use compiled=False"):
        models.loss(model, params, batch, ctx_of(compiled=True))
    with pytest.raises(ValueError, match="layer_tokens is 8, and products are in float8_tensor, whose scales"):
        models.loss(model, params, batch, ctx_of(matmul="float8_tensor"))
    with pytest.raises(ValueError, match="layer_tokens is 8, and the layer computes some of the positions alone"):
        models.loss(models.random_ltd(models.build(dataclasses.replace(LLAMA, layer_tokens=8, n_layers=3)), 30),
                    models.init_params(models.build(dataclasses.replace(LLAMA, n_layers=3)), prng.key(0), F64), batch,
                    ctx_of())  # fmt: skip
    with pytest.raises(ValueError, match="layer_tokens is 8; experts take all their tokens at once"):
        models.MoEConfig(**SIZES, n_kv_heads=2, layer_tokens=8)
    with pytest.raises(ValueError, match=r"layer_tokens is -1; it must be at least 0"):
        dataclasses.replace(LLAMA, layer_tokens=-1)


@pytest.mark.parametrize(
    "settings, words",
    (
        ({"train.compiled": True}, "train.compiled is true"),
        ({"train.remat": "selective:0.5"}, "train.remat is selective:0.5"),
        ({"mesh": {"cp": 2}}, "mesh.cp is 2"),
        ({"mesh": {"tp": 2}, "sequence": True}, "sequence is true"),
        ({"train.random_ltd": 64}, "train.random_ltd is 64"),
    ),
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_config_says_what_does_not_go_with_chunks(settings, words):
    with pytest.raises(
        ValueError, match=f"model.layer_tokens is 128, whose chunks run one after the other, and {words}"
    ):
        plan.config_for("llama-tiny", {"model.layer_tokens": 128, **settings})

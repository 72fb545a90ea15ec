"""Sums over tokens at 32,768 of them, in every dtype and form: within a bound that does not grow with their number.

What is summed is positive, so that a sum in bfloat16 stops at 256 and one in float16 at 2048."""

import warnings

import kernel_laws as laws
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fzero
from fzero import models, optim
from fzero.core import pytree
from fzero.kernels import attention_arguments, embedding, norm
from fzero.kernels import linear_cross_entropy as lce
from fzero.models.layers import linear
from fzero.models.user_functions import WideSums
from fzero.models.weights import LowRankSum

N, D = 1 << 15, 8
# A narrow result is rounded once, and products of narrow numbers before they are summed; what float32 has beside that
# of a result is what it loses in sums of some thousands.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def draw(*shape, seed=0):
    """Numbers from 1/4 to 3/4 that every dtype has, float64."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(32, 96, shape, generator=g).double().to(laws.DEVICE) / 128


def gradients(f, given, which, dtype):
    """The gradients of sum(f(*given) g), g drawn, by the tensors with the numbers `which`; tensors in this dtype."""
    tensors = [x.to(dtype) if x.is_floating_point() else x for x in given]
    leaves = [tensors[i].requires_grad_() for i in which]
    out = laws.tuple_of(f(*tensors))[0]
    return torch.autograd.grad(out, leaves, draw(*out.shape, seed=1).to(out.dtype))


def check(f, given, which, dtype, exact=None):
    got = gradients(f, given, which, dtype)
    for one, want in zip(got, gradients(exact or f, given, which, torch.float64)):
        error = float((one.double() - want).norm() / want.norm())
        assert error <= BOUNDS[dtype], (error, one.flatten()[:3], want.flatten()[:3])


every_dtype = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
NORMS = {
    "rms_norm": (norm.rms_norm, ("auto", "reference", "triton", "cpp", "chunks")),
    "add_rms_norm": (norm.add_rms_norm, ("auto", "reference", "triton", "cpp", "chunks")),
    "layer_norm": (norm.layer_norm, ("auto", "reference", "triton", "rows", "aten")),
    "add_layer_norm": (norm.add_layer_norm, ("auto", "reference", "triton", "rows", "aten")),
}


CASES = [("layer_norm", torch.bfloat16), ("add_rms_norm", torch.float16)]
CASES += [pytest.param(n, d, marks=pytest.mark.slow) for n in NORMS for d in BOUNDS if (n, d) not in CASES]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_scales_and_biases_of_norms(name, dtype):
    op, forms = NORMS[name]
    rows, params = 1 + ("add" in name), 1 + ("layer" in name)
    # Columns of different means: what is normed has a sign of its own in most.
    given = [draw(N, D, seed=i) + torch.arange(D, device=laws.DEVICE) for i in range(rows)]
    given += [draw(D, seed=8 + i) for i in range(params)]
    for form in forms:
        tensors = [x.to(dtype) for x in given]
        if form == "aten" and dtype == torch.float32:
            continue  # torch's own, for transforms alone: its error grows with the root of the rows
        if form not in ("auto", "reference") and op.form(form).supports(*tensors, 1e-5):
            continue
        which = range(rows, rows + params)
        check(lambda *t, form=form: op(*t, 1e-5, impl=form), given, which, dtype, lambda *t: op(*t, 1e-5))


@every_dtype
def test_biases_of_linears_and_rows_of_tables(dtype):
    x, w, b = draw(N, D), draw(D, D, seed=2), draw(D, seed=3)
    # Of weights too where numbers are narrow: in float32 their product's error is the BLAS's.
    check(linear, (x, w, b), (2,) if dtype == torch.float32 else (1, 2), dtype)
    index = torch.arange(N, device=laws.DEVICE).reshape(8, -1) % 3 // 2
    for tokens in (index, index[0], torch.zeros_like(index)):
        check(lambda table, tokens=tokens: embedding.look_up(table, tokens), (draw(4, D),), (0,), dtype)


@every_dtype
def test_magnitudes_of_dora(dtype):
    x, w, a, b, m = draw(N, D), draw(D, D, seed=2), draw(D, 2, seed=3), draw(2, D, seed=4), draw(D, seed=5)
    check(lambda *t: LowRankSum(*t[1:4], 0.5, t[4]).product(t[0]), (x, w, a, b, m), (4,), dtype)


@every_dtype
def test_attention_sinks(dtype):
    q, out, g = draw(1, N, 2, 4), draw(1, N, 2, 4, seed=3).to(dtype), draw(1, N, 2, 4, seed=4).to(dtype)
    lse, sinks = q.sum(-1).mT.to(dtype), draw(2, seed=5).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    found, exact = (
        attention_arguments.gradient(*attention_arguments.with_sinks(out.to(d), lse.to(w), sinks), g.to(d), sinks.to(d))
        for d, w in ((dtype, wide), (torch.float64,) * 2)
    )
    assert float((found.double() - exact).norm() / exact.norm()) <= BOUNDS[dtype]


@pytest.mark.parametrize("compiled", (False, pytest.param(True, marks=pytest.mark.slow)))
@every_dtype
def test_the_head_and_its_loss(dtype, compiled, monkeypatch):
    """In 256 chunks, of which each adds to the gradient of the weight."""
    monkeypatch.setattr(lce, "CHUNK_ROWS", N // 256)
    x, w, targets = draw(N, D), draw(5, D, seed=2), torch.zeros(N, dtype=torch.int64, device=laws.DEVICE)

    def both(impl, dtype):
        leaves = [x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()]
        loss = lce.linear_cross_entropy(*leaves, targets, impl=impl, compiled=compiled)
        return loss, torch.autograd.grad(loss, leaves)[1]

    for got, want in zip(both("chunked", dtype), both("reference", torch.float64)):
        error = float((got.double() - want).detach().norm() / want.detach().norm())
        assert error <= BOUNDS[dtype], (error, got, want)


class Net(nn.Module):
    """Rows of a table, one of which pads, and layers with norms."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, D, padding_idx=1)
        self.bag = nn.EmbeddingBag(4, D)
        self.places, self.steps = nn.Parameter(torch.rand(2, D)), nn.Parameter(torch.rand(2 * D))
        self.edge = nn.Parameter(torch.rand(D, 2))
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)) for _ in range(2))
        self.last = nn.LayerNorm(D, bias=False)

    def forward(self, tokens):
        x = self.table(tokens) + self.bag(tokens.reshape(-1, 16)).repeat_interleave(16, 0).view(*tokens.shape, D)
        at = torch.arange(tokens.shape[1], device=tokens.device) % 2
        x = x + self.places[at] + self.steps.take(at[:, None] * D + torch.arange(D, device=tokens.device))
        x = x + F.pad(self.edge[None], (tokens.shape[1] - 2, 0), mode="replicate").mT
        x = x + F.avg_pool1d(F.pad(self.edge[None], (2046, 0)), 1024, 1).mT[:, 1:] + self.edge.index_select(1, at).mT
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def net_loss(call, batch):
    return (call(batch["tokens"]).float() * batch["weights"]).sum(), batch["tokens"].numel()


@pytest.mark.parametrize("whole", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_norms_and_tables_of_a_module(dtype, whole):
    """torch's own gradients of these are 4 to 90% off at 8,192 tokens."""
    torch.manual_seed(1)
    net, tokens = Net(), torch.arange(8 * 1024).reshape(8, 1024) % 3 // 2 * 2
    tokens[:, ::7] = 1
    batch = {"tokens": tokens, "weights": torch.rand(8, 1024, D) + torch.arange(D) / 4}
    if whole:
        net.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), *[nn.Tanh()] * i) for i in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = fzero.from_module(net, net_loss, batch=batch)
    plan = fzero.zero_plan(0, model, fzero.one_process())
    params = fzero.init_state(model, optim.sgd(1.0), plan, seed=0).params

    def of(dtype):
        at, ctx = pytree.map(lambda x: x.to(dtype), params), models.Ctx(dtype=dtype)
        grads = torch.func.grad(lambda p: models.loss(model, p, batch, ctx).total)(at)
        return pytree.named_leaves(grads)

    for (name, got), want in zip(of(dtype).items(), of(torch.float64).values()):
        assert float((got.double() - want).norm() / want.norm()) < 0.015, name
        assert "table" not in name or not got[1].any()


def places(n, of):
    return torch.arange(n, device=laws.DEVICE) % of


# Functions that read an element thousands of times: (the function, the shapes of its parameters).
READERS = {
    "pad 1d": (lambda p: F.pad(p[None], (N, 2), mode="replicate"), (2, 4)),
    "pad 2d": (lambda p: F.pad(p[None], (N // 4, 0, 0, 3), mode="replicate"), (1, 2, 2)),
    "pad 3d": (lambda p: nn.ReplicationPad3d((N // 4, 0, 0, 0, 0, 1))(p[None]), (1, 2, 2, 2)),
    "interpolate area": (lambda p: F.interpolate(p[None], size=N, mode="area"), (1, 2)),
    "unfold": (lambda p: F.unfold(p[None], kernel_size=32), (1, 64, 64)),
    "windows": (lambda p: p.unfold(0, 1024, step=1), (3 * 1024,)),
    "avg_pool1d": (lambda p: F.avg_pool1d(p[None], 1024, stride=1), (1, 3 * 1024)),
    "avg_pool2d": (lambda p: F.avg_pool2d(p[None], (1, 1024), 1), (1, 1, 3 * 1024)),
    "lp_pool1d": (lambda p: F.lp_pool1d(p[None], 1, 1024, 1), (1, 3 * 1024)),
    "max_pool1d": (lambda p: F.max_pool1d(p[None], 1024, 1), (1, 3 * 1024)),
    "max_pool1d with indices": (lambda p: F.max_pool1d(p[None], 1024, 1, return_indices=True), (1, 3 * 1024)),
    "adaptive_avg_pool1d": (lambda p: F.adaptive_avg_pool1d(p[None], N), (1, 2)),
    "adaptive_avg_pool2d": (lambda p: F.adaptive_avg_pool2d(p[None], (128, None)), (1, 2, 128)),
    "adaptive_avg_pool3d": (lambda p: nn.AdaptiveAvgPool3d((64, 16, 32))(p[None]), (1, 2, 2, 2)),
    "adaptive_max_pool1d": (lambda p: F.adaptive_max_pool1d(p[None], N), (1, 2)),
    "index_select": (lambda p: torch.index_select(input=p, dim=0, index=places(N, 2)), (2,)),
    "index_select 3d": (lambda p: p.index_select(1, places(N, 2)), (2, 2, 2)),
    "layer_norm 2d": (
        lambda w, b: F.layer_norm(draw(N, 2, 2).to(w.dtype), normalized_shape=(2, 2), weight=w, bias=b),
        *((2, 2), (2, 2)),
    ),
    "layer_norm, bias alone": (
        lambda b: F.layer_norm(input=draw(N, D).to(b.dtype), normalized_shape=(D,), bias=b),
        (D,),
    ),
    "embedding": (lambda p: F.embedding(input=places(N, 2), weight=p), (2, D)),
    "embedding_bag": (lambda p: F.embedding_bag(input=places(N, 2)[:, None], weight=p), (2, D)),
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_read_many_times_by_functions_of_torch(name):
    function, *shapes = READERS[name]

    def form(*params):
        with WideSums():
            return function(*params)

    for dtype in (torch.bfloat16, torch.float16):
        check(form, [draw(*shape, seed=i) for i, shape in enumerate(shapes)], range(len(shapes)), dtype, function)


def plain_loss(params, batch):
    x = params["places"][batch["at"], batch["at"]] + F.embedding(batch["tokens"], params["table"])
    image = F.grid_sample(params["image"], batch["grid"].to(params["image"].dtype), align_corners=True).mean((0, 2, 3))
    x = F.layer_norm(x, (D,), params["scale"], params["bias"]) + image
    return (x.float() * batch["weights"]).sum(), batch["tokens"].numel()


def own_head(params, x, batch, ctx):
    x = F.layer_norm(x, (D,), params["head"]["w"][0], x.new_zeros(D) + 0.5)
    return models.Loss((x.float() * batch["weights"]).sum() / 64, torch.tensor(batch["tokens"].numel()))


@pytest.mark.parametrize("kind", ("a plain loss", "a head"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_norms_and_tables_of_functions_of_ones_own(dtype, kind):
    tokens = torch.arange(8 * 1024).reshape(8, 1024) % 3 // 2
    weights = torch.rand(8, 1024, D, generator=torch.Generator().manual_seed(0)) / 64
    batch = {"tokens": tokens, "targets": tokens, "at": tokens % 2, "weights": weights}
    batch |= {"grid": torch.zeros(8, 64, 64, 2)}
    params = {"table": draw(2, D), "places": draw(2, 2, D, seed=1), "scale": draw(D, seed=2), "bias": draw(D, seed=3)}
    source = pytree.map(torch.Tensor.float, params | {"image": draw(8, D, 2, 2, seed=4)})
    loss = plain_loss
    if kind == "a head":
        source = loss = models.build(
            models.MLPConfig(vocab_size=4, max_len=1024, d_model=D, n_layers=1, d_ff=D)
        )._replace(head=own_head)

    def of(policy):
        """What one step of SGD subtracts."""
        plan, tx = fzero.zero_plan(0, source, fzero.one_process(), policy=policy), optim.sgd(1.0)
        state = fzero.init_state(source, tx, plan, seed=0)
        new, metrics = fzero.make_train_step(loss, tx, plan, donate=False)(state, batch)
        assert not bool(metrics.skipped)
        return pytree.named_leaves(pytree.map(torch.sub, state.master or state.params, new.master or new.params))

    found = of(fzero.bf16() if dtype == torch.bfloat16 else fzero.fp16(fzero.LossScale(init=64.0)))
    for (name, got), want in zip(found.items(), of(fzero.fp64()).values()):
        if kind == "a plain loss" or name == "head/w":
            assert float((got.double() - want).norm() / want.norm()) < 0.02, name

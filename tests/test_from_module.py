"""An nn.Module as a Model computes what the module does, wherever its parameters rest; its weights go back."""

import functools
import warnings

import own_modules
import pytest
import ranks
import torch
from close import assert_close, assert_same
from law_cases import FP64
from torch import nn
from torch.nn import functional as F

import fzero
from fzero import checkpoint, models, optim
from fzero.core import purity_checks, pytree
from fzero.offload import Nvme

slow = pytest.mark.slow
STEPS = 5


def adam():
    return optim.adamw(0.02, b2=0.95, eps=1e-5, weight_decay=0.01)


@functools.cache
def by_torch(kind):
    """(the parameters of the module, its losses) after steps of torch's own AdamW."""
    module, loss, batch_of = own_modules.made(kind)
    theirs = torch.optim.AdamW(
        [p for p in module.parameters() if p.requires_grad], lr=0.02, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.01
    )
    log = []
    for i in range(STEPS):
        total, number = loss(module, batch_of(i))
        theirs.zero_grad()
        (total / number).backward()
        theirs.step()
        log.append(float(total.detach() / number))
    return {name: p.detach() for name, p in module.named_parameters()}, log


def by_fzero(
    mesh, kind, stage, how=None, *, example=True, offload="", nvme=None, micro_batches=2, pipeline=None, **options
):
    """The same on a mesh: (parameters put back into a module of other weights, losses)."""
    module, loss, batch_of = own_modules.made(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if kind == "branching" else "error")
        example = example or kind == "branching"  # which shows that it cannot be cut
        model = fzero.from_module(module, loss, batch=batch_of(0) if example else None, **options)
    plan = fzero.zero_plan(stage, model, mesh, policy=FP64, offload=offload, pipeline=pipeline)
    state = fzero.init_state(model, adam(), plan, seed=0, nvme=nvme)
    step = fzero.make_train_step(
        model, adam(), plan, micro_batches=micro_batches, execution=how or fzero.Execution(), nvme=nvme
    )
    log = []
    for i in range(STEPS):
        batch = fzero.local_batch(batch_of(i), mesh, micro_batches)
        state, metrics = step(state, batch)
        log.append(float(metrics.loss))
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    fzero.to_module(state, module, plan)
    return {name: p.detach() for name, p in module.named_parameters()}, log


def assert_torchs(kind, result):
    (parameters, log), (expected, expected_log) = result, by_torch(kind)
    assert_close(log, expected_log, rtol=1e-10)
    assert_close(parameters, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [pytest.param("transformer", marks=slow), "sequential"])
def test_loss_and_gradients_are_the_modules_own(kind):
    module, loss, batch_of = own_modules.made(kind)
    model = fzero.from_module(module, loss, batch=batch_of(0))
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=FP64)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    state, metrics = fzero.make_train_step(model, optim.sgd(1.0), plan)(
        fzero.init_state(model, optim.sgd(1.0), plan, seed=0), batch_of(0)
    )
    total, number = loss(module, batch_of(0))
    (total / number).backward()
    assert_close(metrics.loss, total / number, rtol=1e-12)
    own = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()}
    after = dict(fzero.to_module(state, module).named_parameters())
    assert_close({name: before[name] - after[name] for name in before}, own, rtol=1e-10, atol=1e-13)


@slow
@pytest.mark.parametrize("kind", own_modules.KINDS)
def test_five_steps_on_two_ranks_are_torchs(kind):
    for options in ({"stage": 0}, {"stage": 3, "how": fzero.Execution(remat="full"), "example": False}):
        for result in ranks.run(2, by_fzero_with, kind, options):
            assert_torchs(kind, result)


@slow
@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_five_steps_of_a_pipeline_are_torchs_and_go_back_into_the_module(sizes):
    for kind, stage, layout in (("transformer", 3 if "dp" in sizes else 1, "1,2"), ("sequential", 0, "2,1")):
        options = {"stage": stage, "pipeline": fzero.Pipeline(layout=layout)}
        for result in ranks.run(2 * sizes.get("dp", 1), by_fzero_with, kind, options, mesh=sizes):
            assert_torchs(kind, result)


def by_fzero_with(mesh, kind, options):
    return by_fzero(mesh, kind, **options)


@slow
@pytest.mark.parametrize(
    "how", [fzero.Execution(remat="every:2"), fzero.Execution(compiled=True)], ids=["recomputed", "compiled"]
)
def test_five_steps_are_torchs(how):
    assert_torchs("sequential", by_fzero(fzero.one_process(), "sequential", 0, how))


@slow
def test_five_steps_with_everything_on_a_disk_are_torchs(tmp_path):
    nvme, how = Nvme(tmp_path / "nvme", buffer_bytes=1 << 20), fzero.Execution(remat="full")
    offload = "params=nvme,grads=nvme,opt=nvme,acts=nvme"
    assert_torchs("transformer", by_fzero(fzero.one_process(), "transformer", 0, how, offload=offload, nvme=nvme))


@slow
def test_linears_are_split_over_tp():
    rules = {"^[qkv]$|^up$": "columns", "^o$|^down$": "rows"}
    for result in ranks.run(2, by_fzero_with, "transformer", {"stage": 0, "tp": rules}, mesh={"tp": 2}):
        assert_torchs("transformer", result)


def dropped(mesh, kind, micro_batches):
    module, loss, batch_of = own_modules.made(kind, dropout=0.5)
    model = fzero.from_module(module, loss, batch=batch_of(0))
    plan = fzero.zero_plan(3, model, mesh, policy=FP64)
    state = fzero.init_state(model, adam(), plan, seed=0)
    step, log = fzero.make_train_step(model, adam(), plan, micro_batches=micro_batches), []
    for _ in range(2):
        state, metrics = step(state, fzero.local_batch(batch_of(0), mesh, micro_batches))
        log.append(float(metrics.loss))
    evaluated = fzero.make_eval_step(model, plan)(state.params, fzero.local_batch(batch_of(0), mesh))
    return log, float(evaluated.total / evaluated.num_tokens), fzero.to_module(state, module, plan)


@slow
@pytest.mark.parametrize("kind", ["transformer", "noisy"])
def test_dropout_is_the_same_however_the_batch_is_cut(kind):
    log, evaluated, module = dropped(fzero.one_process(), kind, 1)
    for result in ranks.run(2, dropped, kind, 2):
        assert_close(result[0], log, rtol=1e-10)
    _, loss, batch_of = own_modules.made(kind)
    total, number = loss(module.eval(), batch_of(0))
    # Without a key nothing is dropped, and noise is always the same.
    assert_close(evaluated, float(total.detach() / number), rtol=1e-10 if kind == "transformer" else 1e-3)
    assert abs(log[0] - evaluated) > 1e-3


def test_dropouts_draw_masks_of_their_own():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(x) + 100 * self.drop(x) + 0 * self.linear(x)

    seen = []

    def loss(call, batch):
        seen.append(call(batch["x"]))
        return seen[-1].sum(), 1

    model = fzero.from_module(nn.Sequential(Twice(), Twice()), loss)
    batch = {"x": torch.ones(64, 4)}
    ctx = models.forward.prepare(model, batch, models.Ctx(key=fzero.random.key(1)))
    params = models.init_params(model, fzero.random.key(0))
    x = model.embed(params, batch, ctx)
    layers = [
        model.block({"linear": pytree.map(lambda leaf, i=i: leaf[i], params["blocks"]["linear"])}, x, layer)[0].detach()
        for i, layer in enumerate(ctx._replace(layer=torch.tensor(i)) for i in range(2))
    ]
    masks = [(y % 100 == 2, y >= 100) for y in layers]  # of the first call and of the second
    flat = [mask.flatten().double() for pair in masks for mask in pair]
    for mask in flat:
        assert 0.35 < mask.mean() < 0.65
    for i, a in enumerate(flat):
        for b in flat[:i]:
            assert 0.35 < (a == b).double().mean() < 0.65


@slow
def test_a_checkpoint_goes_to_another_layout(tmp_path):
    module, loss, batch_of = own_modules.made("transformer")
    model, tx = fzero.from_module(module, loss, batch=batch_of(0)), adam()
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=FP64)
    state, _ = fzero.make_train_step(model, tx, plan)(fzero.init_state(model, tx, plan, seed=0), batch_of(0))
    path = checkpoint.save(tmp_path, state, step=1)
    expected = {name: p.detach().clone() for name, p in fzero.to_module(state, module).named_parameters()}
    on_host = fzero.zero_plan(0, model, fzero.one_process(), policy=FP64, offload="params=host,opt=host")
    again = checkpoint.restore(path, like=fzero.init_state(model, tx, on_host, seed=1))
    blank, *_ = own_modules.made("transformer")
    assert_same(dict(fzero.to_module(again, blank).named_parameters()), expected)


@pytest.mark.parametrize("policy", ["fp32", pytest.param("bf16", marks=slow)])
def test_weights_go_in_and_out_bit_by_bit(policy):
    module = own_modules.made("sequential")[0].float()
    kept = {name: leaf.clone() for name, leaf in module.state_dict().items()}
    model = fzero.from_module(module, own_modules.square_loss)
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=policy)
    state = fzero.init_state(model, adam(), plan, seed=0)
    assert "blocks/0/weight" in str(plan)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    assert fzero.to_module(state, module) is module
    assert_same(dict(module.state_dict()), kept)


@slow
def test_gradients_of_examples_and_products_with_the_hessian():
    module, loss, batch_of = own_modules.made("transformer")
    model, batch = fzero.from_module(module, loss), batch_of(0)
    ctx = models.Ctx(dtype=torch.float64)
    params = models.init_params(model, fzero.random.key(0), torch.float64)
    start = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def total(params, batch):
        return models.loss(model, params, batch, ctx).total

    def row_total(params, row):
        return total(params, {name: leaf[None] for name, leaf in row.items()})

    each = torch.func.vmap(torch.func.grad(row_total), in_dims=(None, 0))(params, batch)
    for i in (0, 3):
        row = {name: leaf[i : i + 1] for name, leaf in batch.items()}
        own = torch.autograd.grad(loss(module, row)[0], list(start.values()))
        ours = [each["embed"]["head"]["weight"][i], each["blocks"]["up"]["weight"][i]]
        theirs = dict(zip(start, own))
        assert_close(ours[0], theirs["head.weight"], rtol=1e-10, atol=1e-12)
        stacked = torch.stack([theirs[f"layers.{n}.up.weight"] for n in range(own_modules.L)])
        assert_close(ours[1], stacked, rtol=1e-10, atol=1e-12)
    direction = pytree.map(torch.ones_like, params)
    gradient = torch.func.grad(lambda p: total(p, batch))
    product = torch.func.jvp(gradient, (params,), (direction,))[1]
    step = 1e-5
    near = [gradient(pytree.map(lambda p, by=by: p + by, params)) for by in (step, -step)]
    expected = pytree.map(lambda a, b: (a - b) / (2 * step), *near)
    assert_close(product["blocks"]["up"], expected["blocks"]["up"], rtol=1e-5, atol=1e-5)


def test_neither_the_module_nor_its_memory_is_taken():
    module, loss, batch_of = own_modules.made("sequential", dropout=0.5)
    before = {name: leaf.clone() for name, leaf in module.state_dict().items()}
    model = fzero.from_module(module, loss)
    copies = model.embed.__self__
    held = [p for one in (copies.skeleton, *copies.templates["blocks"]) for p in (*one.parameters(), *one.buffers())]
    assert held and all(p.is_meta for p in held)
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=FP64)
    state = fzero.init_state(model, adam(), plan, seed=0)
    fzero.make_train_step(model, adam(), plan)(state, batch_of(0))
    assert_same(dict(module.state_dict()), before)
    assert module.training and module[1][2].forward.__func__ is nn.Dropout.forward


def test_parameters_without_a_gradient_are_frozen_and_tied_ones_one_leaf():
    module, loss, _ = own_modules.made("transformer")
    model = fzero.from_module(module, loss)
    plan = fzero.zero_plan(0, model, fzero.one_process())
    assert plan.frozen == {"embed/offset"}
    assert "embed/head/weight" in plan.leaves and "embed/tokens/weight" not in plan.leaves
    assert set(model.shared) == {name for name in plan.leaves if name.startswith("embed/")}


def checkpointed(reentrant, outside):
    """A sequential whose layers, or the calls of these, are checkpoints of torch; None for no checkpoint."""

    def call(f, x):
        return f(x) if reentrant is None else torch.utils.checkpoint.checkpoint(f, x, use_reentrant=reentrant)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.3)

        def work(self, x):
            return x + self.drop(torch.tanh(self.linear(x)))

        def forward(self, x):
            return self.work(x) if outside else call(self.work, x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.head = nn.ModuleList(Layer() for _ in range(3)), nn.Linear(4, 1)

        def forward(self, x):
            for layer in self.layers:
                x = call(layer, x) if outside else layer(x)
            return self.head(x)

    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Net().double()


@pytest.mark.parametrize(
    "reentrant, outside",
    [(False, False), *(pytest.param(*pair, marks=slow) for pair in ((True, False), (False, True), (True, True)))],
)
@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=slow)])
def test_torchs_checkpoint_is_passed_over_and_remat_is_named(reentrant, outside, plain):
    def one_step(module):
        model = fzero.from_module(module, own_modules.square_loss, batch=own_modules.points_of(0))
        parameters = model
        if plain:
            parameters = {name: leaf.detach() for name, leaf in module.named_parameters()}

            def model(params, batch):
                return own_modules.square_loss(lambda x: torch.func.functional_call(module, params, (x,)), batch)

        plan = fzero.zero_plan(0, parameters, fzero.one_process(), policy=FP64)
        state = fzero.init_state(parameters, adam(), plan, seed=0)
        metrics = fzero.make_train_step(model, adam(), plan)(state, own_modules.points_of(0))[1]
        return metrics.loss, metrics.grad_norm

    purity_checks.warn_bypassed.cache_clear()
    with pytest.warns(
        UserWarning, match=r'checkpoint is passed over .*Execution\(remat="full"\).*fzero\.remat'
    ) as said:
        found = one_step(checkpointed(reentrant, outside))
    assert len(said) == 1 and found == one_step(checkpointed(None, outside))
    x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)  # elsewhere it works as ever
    torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=reentrant).sum().backward()
    assert x.grad is not None


class Embedded(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.embedding = nn.Embedding(16, 8, sparse=sparse)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_batch_of_slices_and_an_embedding_with_sparse_gradients_train_as_whole_rows_and_dense_ones():
    text = torch.randint(0, 16, (4, 7), generator=torch.Generator().manual_seed(0))
    slices = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    loss = lambda net, b: (F.cross_entropy(net(b["tokens"]).flatten(0, 1), b["targets"].flatten(), reduction="sum"), 24)  # noqa: E731
    ends = []
    for sparse, batch in ((False, {name: x.contiguous() for name, x in slices.items()}), (True, slices)):
        torch.manual_seed(0)
        model, tx = fzero.from_module(Embedded(sparse), loss), optim.sgd(0.1)
        plan = fzero.zero_plan(0, model, fzero.one_process())
        step = fzero.make_train_step(model, tx, plan)
        ends.append(step(fzero.init_state(model, tx, plan, seed=0), batch)[0].params)
    assert_same(*ends)

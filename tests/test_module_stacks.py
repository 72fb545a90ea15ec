"""Modules with several lists of layers, layers of several kinds, and layers that return more than x, train as torch
trains them."""

import functools

import pytest
import ranks
import torch
from close import assert_close
from law_cases import FP64
from torch import nn

import fzero
from fzero import checkpoint, optim, state_specs
from fzero.checkpoint import restore_state
from fzero.core import pytree
from fzero.offload import Nvme
from fzero.train import meta_state

slow = pytest.mark.slow
D, STEPS = 6, 3


class Layer(nn.Module):
    """With a slope of its own, which makes kinds; it hands a bias on, and returns scores that nobody asks for."""

    def __init__(self, slope, crossed):
        super().__init__()
        self.slope, self.linear = slope, nn.Linear(D, D)
        self.cross = nn.Linear(D, D) if crossed else None
        self.register_buffer("size", torch.tensor(0.5 + slope))

    def forward(self, x, bias, seen=None):
        y = self.linear(x) * self.size + bias
        y = y if self.cross is None else y + self.cross(seen).mean(1, keepdim=True)
        return x + torch.nn.functional.leaky_relu(y, self.slope), bias, y.softmax(-1)


class Pair(nn.Module):
    """An encoder and a decoder of one embedding; the head sees what either left."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(2, D), nn.Linear(D, 1)
        self.encoder = nn.ModuleList(Layer(0.1 * (i % 2), False) for i in range(4))
        self.decoder = nn.ModuleList(Layer(0.1 * (i == 1), True) for i in range(3))
        self.norm = nn.LayerNorm(D)
        self.bias = nn.Parameter(torch.randn(D))

    def forward(self, a, b):
        x, bias = self.embed(a), self.bias * 2
        for layer in self.encoder:
            x, bias, _ = layer(x, bias)
        y, seen = self.embed(b), self.norm(x)
        for layer in self.decoder:
            y, _, _ = layer(y, bias + 1, seen=seen)
        return self.head(self.norm(y)) + x.mean((1, 2), keepdim=True)


def made():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Pair().double()


def batch_of(seed):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, n, 2, generator=g, dtype=torch.float64) for name, n in (("a", 5), ("b", 3))}


def loss(call, batch):
    return call(batch["a"], batch["b"]).square().sum(), len(batch["a"])


@functools.cache
def by_torch():
    module, log = made(), []
    theirs = torch.optim.SGD(module.parameters(), lr=0.05)
    for i in range(STEPS):
        total, number = loss(module, batch_of(i))
        theirs.zero_grad()
        (total / number).backward()
        theirs.step()
        log.append(float(total.detach() / number))
    return {name: p.detach() for name, p in module.named_parameters()}, log


def by_fzero(mesh, stage, remat, example):
    module, tx, log = made(), optim.sgd(0.05), []
    model = fzero.from_module(module, loss, batch=batch_of(0) if example else None)
    plan = fzero.zero_plan(stage, model, mesh, policy=FP64)
    state = fzero.init_state(model, tx, plan, seed=0)
    step = fzero.make_train_step(model, tx, plan, execution=fzero.Execution(remat=remat))
    for i in range(STEPS):
        state, metrics = step(state, fzero.local_batch(batch_of(i), mesh))
        log.append(float(metrics.loss))
    fzero.to_module(state, module, plan)
    return {name: p.detach() for name, p in module.named_parameters()}, log


@pytest.mark.parametrize(
    "stage, remat, example", [(0, "none", True), pytest.param(0, "full", False, marks=slow)], ids=["parts", "whole"]
)
def test_two_stacks_of_two_kinds_are_torchs(stage, remat, example):
    assert_close(by_fzero(fzero.one_process(), stage, remat, example), by_torch(), rtol=1e-10, atol=1e-12)


@slow
def test_two_stacks_on_two_ranks_are_torchs():
    for result in ranks.run(2, by_fzero, 3, "full", True):
        assert_close(result, by_torch(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layers", [None, "second", "first"])
def test_of_lists_of_equal_depth_each_gets_its_weights(layers):
    """As the encoder and the decoder of Whisper: alike in the number of layers, here also in their parameters."""

    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.ModuleList(nn.Linear(D, D) for _ in range(3)) for _ in range(2))
            self.head = nn.Linear(D, 1)

        def forward(self, x):
            for layer in (*self.first, *self.second):
                x = layer(x).tanh()
            return self.head(x)

    module = Twins()
    expected = {name: p.detach().clone() for name, p in module.named_parameters()}
    model = fzero.from_module(module, lambda call, batch: (call(batch["x"]).sum(), 4), layers=layers)
    state = fzero.init_state(model, optim.sgd(0.1), fzero.zero_plan(0, model, fzero.one_process()), seed=0)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    again = fzero.to_module(state, module)  # which finds by the names of leaves which list is the state's
    assert_close({name: p.detach() for name, p in again.named_parameters()}, expected, rtol=0, atol=0)


def test_each_part_has_what_it_uses_and_kinds_take_turns():
    model = fzero.from_module(made(), loss, batch=batch_of(0))
    assert list(model.block) == ["blocks_0", "blocks_1"]
    assert [len(some) for some in model.block.values()] == [2, 2]
    assert set(model.shared) == {"embed/embed/weight", "embed/embed/bias", "embed/norm/weight", "embed/norm/bias"}
    assert {"head/head/weight", "blocks_1/cross/weight"} <= set(model.traits.start)


def test_a_list_that_is_no_stack_is_left_to_the_other_parts_and_named():
    class Turned(Pair):
        def forward(self, a, b):
            self_decoder, self.decoder = self.decoder, self.decoder[::-1]
            try:
                return Pair.forward(self, a, b)
            finally:
                self.decoder = self_decoder

    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Turned().double()
    with pytest.warns(UserWarning, match=r"only encoder\.0 to encoder\.3 are trained layer by layer, .*decoder\.\d is"):
        model = fzero.from_module(module, loss, batch=batch_of(0))
    assert callable(model.block) or isinstance(model.block, tuple)
    named = fzero.from_module(made(), loss, layers="decoder", batch=batch_of(0))
    assert "blocks/cross/weight" in named.traits.start and "embed/encoder/0/linear/weight" in named.traits.start


@pytest.mark.parametrize("saved", [True, False])
def test_a_buffer_that_no_state_dict_has_keeps_its_dtype(saved):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.tensor(1.0009765625), persistent=saved)  # 1 in bfloat16

        def forward(self, x):
            seen.append(self.scale.dtype)
            return self.linear(x) * self.scale.to(x.dtype)

    seen: list[torch.dtype] = []
    module = nn.Sequential(nn.Linear(4, 4), Scaled(), Scaled(), nn.Linear(4, 1))
    model = fzero.from_module(module, lambda call, batch: (call(batch["x"]).float().sum(), 2))
    plan, tx = fzero.zero_plan(0, model, fzero.one_process(), policy="bf16"), optim.sgd(0.1)
    fzero.make_train_step(model, tx, plan)(fzero.init_state(model, tx, plan, seed=0), {"x": torch.ones(2, 4)})
    assert set(seen) == {torch.bfloat16 if saved else torch.float32}
    assert pytree.leaves(plan.like)


# ---- three stacks, everything on a disk, tensor parallelism, and on from a checkpoint on another mesh ----


class Wide(nn.Module):
    def __init__(self, slope):
        super().__init__()
        self.slope, self.up, self.down = slope, nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return x + self.down(torch.nn.functional.leaky_relu(self.up(x), self.slope))


class Three(nn.Module):
    """Three lists of layers, with a norm and a scale between them."""

    def __init__(self):
        super().__init__()
        self.embed, self.head, self.norm = nn.Linear(2, D), nn.Linear(D, 1), nn.LayerNorm(D)
        self.first = nn.ModuleList(Wide(0.1) for _ in range(2))
        self.second = nn.ModuleList(Wide(0.2) for _ in range(3))
        self.third = nn.ModuleList(Wide(0.1 * (i % 2)) for i in range(2))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, a):
        x = self.embed(a)
        for layer in self.first:
            x = layer(x)
        x = self.norm(x)
        for layer in self.second:
            x = layer(x)
        x = x * self.scale
        for layer in self.third:
            x = layer(x)
        return self.head(x)


def three_loss(call, batch):
    return (call(batch["a"]).mean(1) - 1).square().sum(), len(batch["a"])


def three_steps(mesh, folder, offload, steps, begin="", end=""):
    """(losses of these steps of stage 3, the module's parameters), from the checkpoint `begin` on; the last state is
    saved in `end`."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        module = Three().double()
    example = {"a": batch_of(0)["a"]}
    model = fzero.from_module(module, three_loss, batch=example, tp={"^up$": "columns", "^down$": "rows"})
    assert list(model.block) == ["blocks_0", "blocks_1", "blocks_2"]
    plan, tx = fzero.zero_plan(3, model, mesh, policy=FP64, offload=offload), optim.adamw(0.02, eps=1e-5)
    nvme = Nvme(folder / f"{mesh.size}", buffer_bytes=1 << 20) if offload else None
    specs = state_specs(plan, tx)
    if begin:
        state = restore_state.restore_state(begin, meta_state(plan, tx), specs, plan, nvme)
    else:
        state = fzero.init_state(model, tx, plan, seed=0, nvme=nvme)
    step, losses, path = fzero.make_train_step(model, tx, plan, nvme=nvme), [], None
    for i in steps:
        state, metrics = step(state, fzero.local_batch({"a": batch_of(i)["a"]}, mesh))
        losses.append(float(metrics.loss))
    if end:
        path = checkpoint.save(folder / end, state, step=int(state.step), specs=specs, mesh=mesh)
    fzero.to_module(state, module, plan)
    return losses, {name: p.detach() for name, p in module.named_parameters()}, path


@pytest.mark.parametrize(
    "sizes",
    [pytest.param({"dp": 2}, marks=slow, id="dp 2"), pytest.param({"tp": 2}, marks=pytest.mark.exhaustive, id="tp 2")],
)
def test_three_stacks_on_a_disk_under_tp_at_stage_3_go_on_on_another_mesh(sizes, tmp_path):
    whole, parameters, _ = three_steps(fzero.one_process(), tmp_path, "", range(6))
    everything = "params=nvme,grads=nvme,opt=nvme"
    begun = ranks.run(4, three_steps, tmp_path, everything, range(3), "", "saved", mesh={"dp": 2, "tp": 2})
    losses, _, path = begun[0]
    assert_close(losses, whole[:3], rtol=1e-10)
    for losses, found, _ in ranks.run(2, three_steps, tmp_path, everything, range(3, 6), path, mesh=sizes):
        assert_close(losses, whole[3:], rtol=1e-10)
        assert_close(found, parameters, rtol=1e-10, atol=1e-12)

"""Which device a tensor stands for: the one that holds it, or that of a plan, whose tensors are fake.

A plan for a GPU runs where there is none. Its tensors are fake ones of a `Planned` mode, in two memories: those on
`Planned.device` stand for tensors on the GPU, those on torch.device("cpu") for the host's. What chooses by device asks
`kind_of` or `target_of`, and is answered for the device planned for; nothing is kept beside the values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

HOST = torch.device("cpu")
# A fake CUDA tensor needs a build with CUDA as soon as autograd sees it. No tensor with memory of its own says that it
# is on cpu:0, and PyTorch takes the two for different devices, so that a program that mixes host and device is refused
# as on a GPU.
ELSEWHERE = torch.device("cpu", 0)


class Target(NamedTuple):
    """What a program's choices depend on of the device that it runs on."""

    kind: str  # "cpu" or "cuda"
    processors: int = 0  # multiprocessors of a GPU
    capability: tuple[int, int] = (0, 0)  # of a GPU, CUDA's compute capability
    name: str = ""


CPU = Target("cpu")


class FakeDevice(FakeTensorMode):
    """A context in which tensors are made without memory, and stand for tensors on `target` (those on `device`) and on
    its host.

    torch.tensor of Python's numbers makes one on the host whatever device it is given: write
    torch.tensor(0).to(device).

    tracing: a graph is traced with these tensors; no step is run, and no collective is entered in a ledger.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return (
            False  # else Dynamo is imported, which takes a second, and asked at every operator; it traces none of this
        )

    def __init__(self, target: Target = CPU, *, tracing: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.target, self.tracing = target, tracing
        self.device = HOST if target.kind == "cpu" else ELSEWHERE

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What the mode of all fake tensors does. Numbers that are known are so on the host alone."""
        if (
            func is torch.ops.aten._to_copy.default
            and (kwargs or {}).get("device") == ELSEWHERE
            and isinstance(args[0], FakeTensor)
        ):
            args[0].constant = None
        return super().__torch_dispatch__(func, types, args, kwargs)


@functools.cache
def _target_here(device: torch.device) -> Target:
    if device.type != "cuda":
        return Target(device.type)
    found = torch.cuda.get_device_properties(device)
    return Target("cuda", found.multi_processor_count, (found.major, found.minor), found.name)


def target_of(x: Tensor) -> Target:
    """The device that `x` is on, or stands for in a plan."""
    if x.device != ELSEWHERE:
        return _target_here(x.device)
    plan = fake_device_of(x)
    assert plan is not None, "a tensor on cpu:0 outside a plan"
    return plan.target


def kind_of(x: Tensor) -> str:
    """ "cpu", "cuda" or another of torch's types: of the device that `x` is on, or stands for in a plan."""
    device = x.device
    return device.type if device.index is None or device.type != "cpu" else target_of(x).kind


def fake_device_of(x: Tensor) -> FakeDevice | None:
    """The plan whose tensor `x` is, or wraps under a torch.func transform; None for any other."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x.fake_mode if isinstance(x, FakeTensor) and isinstance(x.fake_mode, FakeDevice) else None


def is_traced(x: Tensor) -> bool:
    """Whether `x` is of a plan in which a graph is traced."""
    plan = fake_device_of(x)
    return plan is not None and plan.tracing


_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
_LIBRARY.define("record_launch(str what, Tensor[] read, Tensor(a!)[] written) -> ()")
torch.library.register_fake("fzero::record_launch", lambda what, read, written: None, lib=_LIBRARY)


def record_launch(what: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """In a plan, in place of the launch of a kernel that is no operator: what it reads and what it writes, for whoever
    counts.
    """
    torch.ops.fzero.record_launch(what, list(read), list(written))

"""The sources of a leaf to save: a tensor in memory, a leaf on a disk, or a function that makes it; what is none of
these is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint.extras import EXTRAS
from fzero.checkpoint.layout import ZARR
from fzero.checkpoint.manifest import MOST_DIMS
from fzero.core import pytree, torch_private
from fzero.core.files import leaf_fault
from fzero.core.gpu import HOST
from fzero.core.pytree import Tree
from fzero.offload import DiskTensor
from fzero.sharding import Mesh, Spec
from fzero.sharding.slices import narrow_box
from fzero.train.state import expect_alive


@dataclass(frozen=True, eq=False)
class Lazy:
    """A leaf that is made when it is written, and then freed: `give()` returns a tensor of this dtype and shape.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> leaf = checkpoint.Lazy(torch.float32, (2,), lambda: torch.ones(2))
    >>> path = checkpoint.save(tempfile.mkdtemp(), {"w": leaf}, step=0)
    >>> checkpoint.restore_leaves(path, lambda name: True)
    {'w': tensor([1., 1.])}
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    give: Callable[[], Tensor]


def check_state(state: Tree, specs: Tree | None, step: int, mesh: Mesh) -> dict[str, tuple[Any, Spec]]:
    """{name: (leaf, its Spec)} of a state to save; raises ValueError naming what cannot be stored."""
    if type(step) is not int or step < 0:
        raise ValueError(f"checkpoint: step is {step!r}; it must be an int of at least 0")
    if step >= 1 << 63:
        raise ValueError(f"checkpoint: step is {step}; it must be below 2^63")
    if specs is None and mesh.size > 1:
        raise ValueError(
            "checkpoint: a state on several processes needs specs=, the Spec of every leaf; see fzero.state_specs"
        )
    expect_alive(state)
    named, spec_leaves = pytree.named_leaves(state), {} if specs is None else pytree.named_leaves(specs)
    fault = leaf_fault(named)
    if not fault and "" in named and isinstance(state, (dict, list, tuple)):
        fault = "the state has an empty key"
    if fault:
        raise ValueError(f"checkpoint: {fault}; rename it, as leaves are files under their names")
    for name, leaf in named.items():
        if name.startswith(EXTRAS):
            raise ValueError(
                f"checkpoint: the state has a part called {EXTRAS[:-1]}, where values beside a state are; rename it"
            )
        fault = kind_fault(leaf)
        if fault:
            raise ValueError(f"checkpoint: {f'leaf {name!r}' if name else 'the state'} {fault}")
    return {name: (leaf, spec_leaves[name] if specs is not None else Spec()) for name, leaf in named.items()}


def kind_fault(leaf: Any) -> str:
    """Why a leaf cannot be stored and what to save instead, to follow its name; "" if it can be."""
    if not isinstance(leaf, (Tensor, DiskTensor, Lazy)):
        return f"is a {type(leaf).__name__}, not a tensor; use torch.tensor, or () for nothing"
    if isinstance(leaf, Tensor):
        # torch tells a type checker that this function takes no arguments.
        if type(leaf).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # pyright: ignore[reportAttributeAccessIssue]
            return (
                f"is a {type(leaf).__name__}, which is no plain tensor; save what it holds (.to_local() of a DTensor)"
            )
        if leaf.is_nested or leaf.layout != torch.strided:
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.").strip("_")
            return f"is a {kind} tensor and a checkpoint holds dense ones; save .to_dense(), or its parts"
        if leaf.device.type == "meta":
            return "is on the meta device and has no elements; give it values first"
        if torch_private.is_functorch_wrapped_tensor(leaf):
            return "is a tensor inside of a transformation of torch.func; save outside of it"
    if len(leaf.shape) > MOST_DIMS:
        return f"has {len(leaf.shape)} dims and a checkpoint holds leaves of at most {MOST_DIMS}; save a .reshape of it"
    if leaf.dtype.is_complex:
        return f"is {leaf.dtype} and a checkpoint holds real numbers; save torch.view_as_real of it"
    if leaf.dtype not in ZARR:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in ZARR)
        return f"is {leaf.dtype}; a checkpoint holds {names}"
    return ""


def box_reader(leaf: Any) -> Callable[[tuple[int, ...], tuple[int, ...]], Tensor]:
    """Return a function (start, size) -> the elements [start, start + size) of a leaf."""
    if isinstance(leaf, Lazy):
        leaf_value = leaf.give()
        expected = f"{leaf.dtype} of shape {list(leaf.shape)}"
        wanted = leaf.dtype, tuple(leaf.shape)
        if not isinstance(leaf_value, Tensor) or (leaf_value.dtype, tuple(leaf_value.shape)) != wanted:
            actual = (
                f"{leaf_value.dtype} of shape {list(leaf_value.shape)}"
                if isinstance(leaf_value, Tensor)
                else leaf_value
            )
            raise ValueError(f"a Lazy leaf says {expected}, and its give() returned {actual}")
        leaf = leaf_value.to(HOST)
    if isinstance(leaf, DiskTensor):
        return disk_box_reader(leaf)
    return lambda start, size: narrow_box(leaf.detach(), start, size)


def disk_box_reader(leaf: DiskTensor) -> Callable[[tuple[int, ...], tuple[int, ...]], Tensor]:
    """As `box_reader`, for a leaf on a disk; the layers that were read last stay in memory."""
    cached: tuple[Any, Tensor] | None = None

    def give(start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        nonlocal cached
        layers = (start[0], size[0]) if leaf.leaf.stacked else (0, 1)
        if cached is None or cached[0] != layers:
            cached = None
            cached = (layers, leaf.tensor(layers=layers))
        return narrow_box(cached[1], (0, *start[1:]), size) if leaf.leaf.stacked else narrow_box(cached[1], start, size)

    return give

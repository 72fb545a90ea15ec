"""Attention by the libraries that PyTorch brings or activates on a GPU: cuDNN, FlashAttention 2, 3, 4, and CUTLASS.

They serve whole causal sequences, with grouped heads. FlashAttention 3 and 4 need their package and PyTorch 2.11:
PyTorch then puts their kernels in place of FlashAttention 2's, for the whole process, so a call of one form activates
its own. A second run of FlashAttention's backward pass gives the same bits only under PyTorch's switch for
deterministic algorithms, which is on during its calls; cuDNN's has no such way, so "auto" never takes it.

A float32 product is three of TensorFloat-32 in CUTLASS ("efficient"): with a = a1 + a2, a1 the first 11 bits of a and
a2 the next 11, a b = a1 b1 + a1 b2 + a2 b1 but for a part in 2^22, on the matrix units.

Shapes: q [B, T, H, K], k and v [B, T, G, K], out [B, T, H, K], lse float32 [B, H, T].
Ref: Dao 2023, arXiv:2307.08691 (FlashAttention-2); Shah et al. 2024, arXiv:2407.08608 (FlashAttention-3).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import attention as torch_attention

from fzero.core.device import fake_device_of, kind_of, target_of
from fzero.kernels import attention_pattern, tuning
from fzero.kernels.attention_arguments import outputs_of
from fzero.kernels.attention_pattern import FULL, Pattern
from fzero.kernels.custom_operator import Fused, operator
from fzero.kernels.registry import Form

aten = torch.ops.aten
Tensors = tuple[Tensor, ...]


class Library(NamedTuple):
    """A library: how PyTorch calls it, and what it serves; its functions take [B, heads, T, K]."""

    forward: Callable[..., tuple[Tensor, Tensor]]  # (q, k, v, scale) -> (out, lse in any shape of B H T elements)
    backward: Callable[..., Tensors]  # (g, q, k, v, out, lse, scale) -> (dq, dk, dv)
    capabilities: tuple[tuple[int, int], tuple[int, int]]  # of the oldest and the newest GPU
    widest: int  # head dim
    activated: str = ""  # PyTorch's name for what takes the place of FlashAttention 2
    package: str = ""  # that must be installed for it
    repeats: bool = True  # whether a second run gives the same bits
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)[:2]


def _cudnn_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, ...]:
    none, t = torch.empty((), dtype=torch.int64, device=q.device), q.shape[2]  # the state of a dropout that is not
    return aten._scaled_dot_product_cudnn_attention_backward(
        g, q, k, v, out, lse[..., None], none, none, None, None, None, t, t, 0.0, True, scale=scale
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    with repeating():
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)[:2]


def _flash_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, ...]:
    none, t = torch.empty((), dtype=torch.int64, device=q.device), q.shape[2]
    with repeating():
        return aten._scaled_dot_product_flash_attention_backward(
            g, q, k, v, out, lse, None, None, t, t, 0.0, True, none, none, scale=scale
        )


CAUSAL = 1  # CUTLASS's number of the mask
LSE_ROWS = 32  # it keeps the log-sum-exps of a multiple of so many queries


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    every = [x.transpose(1, 2) for x in (q, *_repeat_heads(q, k, v))]
    options = {"compute_log_sumexp": True, "scale": scale}
    out, lse, *_ = aten._efficient_attention_forward(*every, *(None,) * 5, 0.0, CAUSAL, **options)
    return out.transpose(1, 2), lse[:, :, : q.shape[2]]


def _efficient_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, ...]:
    none, t = torch.empty((), dtype=torch.int64, device=q.device), q.shape[2]
    g, *every, out = (x.transpose(1, 2) for x in (g, q, *_repeat_heads(q, k, v), out))
    lse = torch.nn.functional.pad(lse, (0, -t % LSE_ROWS), value=torch.inf)
    # With the keys in one part nothing is added to by two blocks at a time: a second run gives the same bits.
    options = {"scale": scale, "num_splits_key": 1}
    arguments = (g, *every, None, out, None, None, t, t, lse, 0.0, none, none, CAUSAL, False)
    dq, dk, dv, _ = aten._efficient_attention_backward(*arguments, **options)
    groups, share = k.shape[1], q.shape[1] // k.shape[1]
    dk, dv = (x.unflatten(2, (groups, share)).sum(3) for x in (dk, dv))
    return tuple(x.transpose(1, 2) for x in (dq, dk, dv))


def _repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, G, T, K] for each of the heads of q."""
    share = q.shape[1] // k.shape[1]
    return (k, v) if share == 1 else (k.repeat_interleave(share, 1), v.repeat_interleave(share, 1))


FLASH = _flash_forward, _flash_backward
# What PyTorch asks for before it calls them: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, and
# torch/nn/attention/_fa3.py and _fa4.py.
LIBRARIES = {
    "fa3": Library(*FLASH, ((9, 0), (9, 9)), 256, "FA3", "flash_attn_interface"),
    "fa4": Library(*FLASH, ((9, 0), (10, 9)), 128, "FA4", "flash_attn.cute.interface"),
    "cudnn": Library(_cudnn_forward, _cudnn_backward, ((8, 0), (12, 1)), 128, repeats=False),
    "flash": Library(*FLASH, ((8, 0), (12, 1)), 256),
    "efficient": Library(_efficient_forward, _efficient_backward, ((8, 0), (12, 1)), 256, dtypes=(torch.float32,)),
}
FEWEST = 64  # rows times heads from which on "auto" takes "efficient": its backward pass has a block for each


@contextlib.contextmanager
def repeating() -> Iterator[None]:
    """A context under PyTorch's switch for deterministic algorithms, without filling new memory."""
    previous, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = fill and previous
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(previous, warn_only=warn)
        settings.fill_uninitialized_memory = fill


def activate(name: str) -> None:
    """Have PyTorch's FlashAttention be that of `name`, "" for the one that it brings."""
    if not hasattr(torch_attention, "activate_flash_attention_impl"):  # PyTorch has no other
        return
    if (torch_attention.current_flash_attention_impl() or "") == name:
        return
    if name:
        torch_attention.activate_flash_attention_impl(name)
    else:
        torch_attention.restore_flash_attention_impl()


def _ready(name: str) -> Library:
    library = LIBRARIES[name]
    if library.forward is _flash_forward:
        activate(library.activated)
    return library


def _head_major(x: Tensor) -> Tensor:
    """x [B, T, heads, K] as [B, heads, T, K], with the elements of a head contiguous."""
    return (x if x.stride(3) == 1 else x.contiguous()).transpose(1, 2)


@operator(
    "library_forward(Tensor q, Tensor k, Tensor v, str library, float scale) -> (Tensor, Tensor)",
    outputs_of,
    flop=attention_pattern.library(attention_pattern.FORWARD_PRODUCTS),
)
def library_forward(q: Tensor, k: Tensor, v: Tensor, library: str, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of causal attention by a library of LIBRARIES."""
    out, lse = _ready(library).forward(*map(_head_major, (q, k, v)), scale)
    return out.transpose(1, 2).contiguous(), lse.reshape(q.shape[0], q.shape[2], q.shape[1]).contiguous()


@operator(
    "library_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, str library, float scale) -> "
    "(Tensor, Tensor, Tensor)",
    lambda g, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)),
    flop=attention_pattern.library(attention_pattern.BACKWARD_PRODUCTS, 1),
)
def library_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, library: str, scale: float
) -> Tensors:
    """(dq, dk, dv) for the gradient g of out; the other arguments as in `library_forward`, and its results."""
    heads = (_head_major(x) for x in (g.contiguous(), q, k, v, out.contiguous()))
    grads = _ready(library).backward(*heads, lse, scale)
    return tuple(x.transpose(1, 2).contiguous() for x in grads)


def library_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    library: str,
    pattern: Pattern = FULL,
    documents: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`attention.reference`, for calls that `refusal_reason` has nothing against."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return library_forward(q, k, v, library, scale)

    def backward(saved: Tensors, grads: Tensors) -> Tensors:
        return library_backward(grads[0], *saved, library, scale)

    fused = Fused(
        f"attention by {library}", forward, backward, select_saved=lambda tensors, outputs: (*tensors, *outputs)
    )
    return fused(q, k, v)


def refusal_reason(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    library: str,
    pattern: Pattern = FULL,
    documents: Tensor | None = None,
    positions: Any = None,
    mask: Any = None,
    sinks: Tensor | None = None,
    **options: Any,
) -> str:
    """The reason why a library does not serve a call; "" if it does."""
    (b, t, h, dim), groups, backend = q.shape, k.shape[2], LIBRARIES[library]
    if positions is not None:
        return "it has no positions; triton has them"
    if mask is not None:
        return "it has no block masks; triton has them"
    if documents is not None:
        return "it has no documents packed in a row; triton has them, and a run without data.within_documents has none"
    if sinks is not None:
        return "it has no sinks; triton has them"
    if pattern != FULL:
        return f"it has no patterns, such as {pattern.kind}; triton has them"
    if q.dtype not in backend.dtypes or not q.dtype == k.dtype == v.dtype:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in backend.dtypes)
        return f"the dtypes are {q.dtype}, {k.dtype} and {v.dtype}; it takes three of {names}"
    if v.shape != k.shape or k.shape != (b, t, groups, dim) or h % max(1, groups):
        return (
            f"the shapes are {list(q.shape)}, {list(k.shape)} and {list(v.shape)}; it takes as many queries as keys, "
            "and keys and values alike"
        )
    if dim % 8 or dim > backend.widest:
        return f"the head dim is {dim}; it takes multiples of 8 up to {backend.widest}"
    if t < 2 or not b * h or max(b, h) > 65535:
        return f"q is {list(q.shape)}; it takes at least two positions, and up to 65,535 rows and heads"
    return _device_refusal(q, backend)


def _device_refusal(q: Tensor, backend: Library) -> str:
    """The reason why this GPU, or this machine, has not a library; "" if it has."""
    if kind_of(q) != "cuda":
        return f"a tensor is on {kind_of(q)}, and it runs on cuda"
    target, (oldest, newest) = target_of(q), backend.capabilities
    if torch.version.hip or target.name.startswith("AMD"):
        return f"the device is {target.name}; it runs on NVIDIA's"
    if not oldest <= target.capability <= newest:
        return f"the device has compute capability {target.capability}; it takes {oldest} to {newest}"
    if fake_device_of(q) is not None:  # of a plan: the run may be on another machine
        return ""
    if backend.forward is _cudnn_forward and not torch.backends.cudnn.is_available():
        return "this PyTorch has no cuDNN"
    return missing_package(backend)


@functools.cache
def missing_package(backend: Library) -> str:
    """The package that a library needs and that is not installed here; "" for none."""
    if not backend.activated:
        return ""
    if not hasattr(torch_attention, "activate_flash_attention_impl"):
        return f"torch {torch.__version__} cannot activate {backend.activated}; 2.11 and later can"
    try:
        module_spec = importlib.util.find_spec(backend.package)
    except ModuleNotFoundError:
        module_spec = None
    return "" if module_spec is not None else f"{backend.package} is not installed"


def order(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[str, ...]:
    """The forms as "auto" should ask them on q's device, the fastest first, or ()."""
    if kind_of(q) != "cuda":
        return ()
    ranking = tuning.order_of_attention(target_of(q).name, str(q.dtype).removeprefix("torch."), q.shape[3], q.shape[1])
    # Of float32 nothing is measured unless a table says so: what the matrix units compute comes first.
    return ranking if q.dtype != torch.float32 or "efficient" in ranking else ("efficient", "triton", *ranking)


def auto_refusal(q: Tensor, k: Tensor, v: Tensor, *, library: str, **options: Any) -> str:
    """The reason why "auto" should not take a library."""
    if not LIBRARIES[library].repeats:
        return "a second run of its backward pass gives other bits; ask for it by name"
    if library == "efficient" and q.shape[0] * q.shape[2] < FEWEST:
        return f"its backward pass has a block for each row and head, {q.shape[0] * q.shape[2]} here, below {FEWEST}"
    if library in tuning.without_repeats(target_of(q).name, str(q.dtype).removeprefix("torch.")):
        return "a second run of its backward pass gave other bits when `fzero bench` measured it; ask for it by name"
    if LIBRARIES[library].package and fake_device_of(q) is not None:
        return f"a plan does not know whether {LIBRARIES[library].package} is installed; ask for it by name"
    return "" if library in order(q, k, v) else "no table says how fast it is on this GPU; `fzero bench` measures it"


def forms() -> list[Form]:
    """The forms of `attention`, one for each library."""
    return [
        Form(
            name,
            functools.partial(library_attention, library=name),
            supports=functools.partial(refusal_reason, library=name),
            prefers=functools.partial(auto_refusal, library=name),
        )
        for name in LIBRARIES
    ]

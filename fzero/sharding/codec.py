"""In how few bytes parameters and gradients travel between the ranks over which ZeRO shards, and what that changes.

    qwZ    parameters are gathered as codes; a step is one on rounded parameters
    qgZ    each rank's term of a sum of gradients is rounded once, sent to the rank that keeps its part of the sum, and
           added there in float32, in the order of a plain sum (see core.tree_sum)
    hpZ    parameters rest over rp as well; what the ranks of a node hold together stays for the rest of the step
    LoCo   what rounding takes from gradients is kept and sent later (see error_feedback.py)
    1bit   an optimizer makes the sums itself, by signs of its momentum (see error_feedback.py)

Sources: Wang et al. 2023, "ZeRO++: extremely efficient collective communication for giant model training",
arXiv:2306.10209, sections 3.1 to 3.3; Xie et al. 2024, "LoCo: low-bit communication adaptor for large-scale model
training", arXiv:2407.04480, section 3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.comm.collectives import Ledger, start_all_gather, start_all_to_all
from fzero.comm.communicator import Axis
from fzero.comm.messages import pack, padded, unpack
from fzero.core.config_tables import check_choice, one_of, power_of_two
from fzero.core.precision import TreeSum

Plan = Any  # fzero.sharding.plan.Plan, which is made with this
KINDS = ("int8", "int4", "fp8_e4m3")
SIGNS = "1bit"  # of grads alone
BETA = 0.8  # LoCo's, where the text says "loco"
FORMS = {  # of a part of a text: what its value matches, and how it is read
    "params": (r".+", str),
    "grads": (r".+", str),
    "hpz": (r"", lambda _: True),
    "block": (r"[0-9]+", int),
    "loco": (r"|[0-9]*\.?[0-9]+(e-?[0-9]+)?", lambda text: float(text) if text else BETA),
    "reset": (r"[0-9]+", int),
    "errors": (r".+", str),
    "local": (r"", lambda _: True),
}
ERROR_KINDS = ("int8",)  # in which what LoCo keeps may rest


@dataclass(frozen=True)
class Codec:
    """How parameters and gradients travel between ranks, in codes of blocks that share a scale (see kernels.quantize).

    params: the kind of code in which stage 3 gathers parameters, "int8", "int4" or "fp8_e4m3"; "": as they are.
    grads: that of gradients on their way to the rank that keeps their sum; "": in policy.reduce. "1bit": the optimizer
        is given each rank's own term of a sum, and sends the signs of its momentum (see fzero.optim.onebit_adam).
    hpz: whether parameters rest over dp and rp, and each rank keeps, from their first use in a step on, the codes that
        dp alone shards: they pass between the ranks of rp, which are slow links, once a step.
    block: the elements that share a scale, a power of two from 16 to 8192: of parameters those of a row, of gradients
        neighbours in what one rank is sent, which are of two rows, or two small leaves of a layer, where the block does
        not divide the last dim (docs/codec.md says what that costs).
    loco: what `grads` loses is kept by the rank that sends it: beta, the part of it that is added to what it sends
        next, in (0, 1]; None: it is lost.
    reset: after so many steps these errors are dropped, again and again; None: never.
    errors: the kind of code in which they rest in the state, "int8" with a scale for each block of a row; "": in
        float32. What that rounding takes is lost.
    local: with grads=1bit: the optimizer makes the sums of all leaves, and none in most steps, in which the ranks move
        apart (see fzero.optim.zero_one_adam).

    Leaves of one dim in a layer (biases, norms) and integers travel as they are.

    >>> Codec.parse("params=int8,grads=int4,hpz")
    Codec(params='int8', grads='int4', hpz=True, block=128, loco=None, reset=None, errors='', local=False)
    >>> print(Codec.parse("grads=int4,loco,reset=1024"))
    grads=int4,loco=0.8,reset=1024
    """

    params: str = ""
    grads: str = ""
    hpz: bool = False
    block: int = 128
    loco: float | None = None
    reset: int | None = None
    errors: str = ""
    local: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("params", self.params), ("grads", self.grads)):
            kinds = KINDS if name == "params" else (*KINDS, SIGNS)
            if kind:
                check_choice(f"codec: {name}", kind, kinds)
        power_of_two(16, 8192).check("codec: block", self.block)
        if not (self.params or self.grads or self.hpz):
            raise ValueError("codec: nothing is coded; write params=int8, or grads=int4, or params=int8,grads=int4")
        if self.loco is not None and not 0 < self.loco <= 1:
            raise ValueError(f"codec: loco is {self.loco}; it must be above 0 and at most 1 (see LoCo's beta)")
        if self.reset is not None and self.reset < 1:
            raise ValueError(f"codec: reset is {self.reset}; it is a number of steps, at least 1")
        if self.loco is not None and not self.grads:
            raise ValueError(
                f"codec: loco is {self.loco} and grads is not given, whose errors it keeps; write "
                f"{replace(self, grads='int4')}"
            )
        if self.reset is not None and self.loco is None:
            raise ValueError(
                f"codec: reset is {self.reset} and loco is not given, whose errors it drops; write "
                f"{replace(self, grads=self.grads or 'int4', loco=0.8)}"
            )
        if self.errors and (self.errors not in ERROR_KINDS or self.loco is None):
            overrides = {"grads": self.grads or "int4", "loco": self.loco or 0.8}
            written = [str(replace(self, errors=kind, **overrides)) for kind in ERROR_KINDS]
            raise ValueError(
                f"codec: errors is {self.errors!r}; it is how the errors of loco rest: write {' or '.join(written)}"
            )
        if self.signs and (self.params or self.hpz or self.loco is not None or self.block != 128):
            raise ValueError(
                f"codec: grads is {SIGNS}, whose optimizer has errors and scales of its own; write "
                f"{Codec(grads=SIGNS, local=self.local)}"
            )
        if self.local and not self.signs:
            raise ValueError(
                f"codec: local leaves sums to an optimizer that sends signs, and grads is {self.grads!r}; write "
                f"grads={SIGNS},local"
            )

    @property
    def signs(self) -> bool:
        """Whether the optimizer makes the sums of gradients by signs."""
        return self.grads == SIGNS

    @property
    def feedback(self) -> bool:
        """Whether what is lost on the way is kept, and sent later."""
        return self.loco is not None or self.signs

    @classmethod
    def parse(cls, text: str) -> Codec:
        """The Codec of a text such as "params=int8,grads=int4,hpz,block=64"; raises ValueError for another one."""
        options: dict[str, Any] = {}
        for entry in filter(None, text.replace(" ", "").split(",")):
            name, _, value = entry.partition("=")
            if name not in FORMS or name in options:
                raise ValueError(
                    f"codec {text!r}: {entry!r} is not one of params=KIND, grads=KIND, hpz, block=N, loco, loco=BETA, "
                    "reset=STEPS, errors=KIND and local, each once"
                )
            form, read = FORMS[name]
            if not re.fullmatch(form, value) or entry.endswith("="):
                raise ValueError(
                    f"codec {text!r}: {entry!r} has another form; write for example params=int8,hpz,block=64,"
                    "grads=int4,loco=0.8,reset=1024"
                )
            options[name] = read(value)
        return cls(**options)

    def __str__(self) -> str:
        parts = [f"{name}={kind}" for name, kind in (("params", self.params), ("grads", self.grads)) if kind]
        parts += [*["hpz"] * self.hpz, *[f"block={self.block}"] * (self.block != 128)]
        parts += [] if self.loco is None else [f"loco={self.loco}"]
        parts += [] if self.reset is None else [f"reset={self.reset}"]
        return ",".join([*parts, *[f"errors={self.errors}"] * bool(self.errors), *["local"] * self.local])

    def pieces(self, kind: str, elements: int, last: int) -> list[tuple[int, torch.dtype]]:
        """(number, dtype) of the codes of a kind of so many elements in rows of `last`, and of their scales."""
        code_bytes = elements // last * (-(-last // 2) if kind == "int4" else last)
        return [(code_bytes, torch.uint8), (elements // last * -(-last // self.block), torch.float32)]


class Coder(NamedTuple):
    """The operations of a kind of code, by blocks of the last dim; codes are uint8, scales float32."""

    encode: Callable[[Tensor], tuple[Tensor, ...]]  # x [.., n] -> (codes, scales)
    # ((codes, scales), dtype, n) -> x
    decode: Callable[[tuple[Tensor, ...], torch.dtype, int], Tensor]  # ((codes, scales), dtype, n) -> x
    # (codes [R, ..], scales [R, ..]), n -> the sum over R, coded again
    add: Callable[[tuple[Tensor, ...], int], tuple[Tensor, ...]]


def sum_coded(
    op: str, names: Sequence[str], tensors: list[Tensor], axis: Axis, coder: Coder, dtype: torch.dtype, ledger: Ledger
) -> Iterator[Any]:
    """Sum float32 or wider `tensors`, sent as codes, by a "scatter" or "psum"; yields when collectives have started."""
    shapes, label, ranks = [t.shape for t in tensors], " ".join(names), axis.size
    dtype, wide = torch.promote_types(dtype, torch.float32), torch.promote_types(tensors[0].dtype, torch.float32)
    rows = pack(tensors, ranks if op == "scatter" else 1, wide)
    tensors.clear()
    if op == "psum":
        rows = F.pad(rows, (0, padded(rows.shape[1], ranks) - rows.shape[1])).view(ranks, -1)
    width = rows.shape[1]
    sent = coder.encode(rows)
    del rows
    with ledger.phase("reduce"):
        pending = [start_all_to_all(chunk, axis, leaf=label) for chunk in sent]
    yield pending
    parts = tuple(collective.wait() for collective in pending)
    if op == "scatter":
        total = TreeSum()
        for rank in range(ranks):
            total.add(coder.decode(tuple(chunk[rank : rank + 1] for chunk in parts), dtype, width))
        return unpack(total.sum(), [(shape[0] // ranks, *shape[1:]) for shape in shapes])
    with ledger.phase("reduce"):
        pending = [start_all_gather(chunk[None], axis, leaf=label) for chunk in coder.add(parts, width)]
    yield pending
    full = coder.decode(tuple(collective.wait() for collective in pending), dtype, width).flatten()
    return unpack(full[None, : sum(math.prod(shape) for shape in shapes)].contiguous(), shapes)


@dataclass(frozen=True)
class Local:
    """How members agree: every `every` steps, in codes of kind `codec`, and plainly after each of the first `after`.

    >>> [Local(every=4, after=4).due(step) for step in range(1, 9)]
    [False, False, False, False, False, False, False, True]
    """

    every: int = 20  # H, the steps of a member between two sums
    # in which d is sent: "int8", "int4" or "fp8_e4m3"; "": as it is
    codec: str = ""  # in which d is sent: "int8", "int4" or "fp8_e4m3"; "": as it is
    # steps at the start of the run, after each of which members take their mean; a multiple of `every`
    after: int = 0  # steps at the start of the run, after each of which members take their mean; a multiple of `every`

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"local: every is {self.every!r}; it is the steps between two times, at least 1")
        if self.codec:
            one_of(KINDS).check("local: codec", self.codec)
        if type(self.after) is not int or self.after < 0 or self.after % self.every:
            raise ValueError(f"local: after is {self.after!r}; it must be 0 or a multiple of every = {self.every}")

    def takes_mean(self, step: int) -> bool:
        """Whether members take their mean after so many steps, and not yet train apart."""
        return step <= self.after

    def due(self, step: int) -> bool:
        """Whether d is sent after so many steps."""
        return not self.takes_mean(step) and step % self.every == 0

"""The registry of hot operations: each has a reference that defines it and faster forms; the registry chooses a form
for a call.

An operation is a function of tensors, `op(*args, impl="auto", **options)`. Its `reference` is plain PyTorch: it defines
the result and composes with every transform. A `Form` is another implementation, which reports the calls it supports.
"auto" takes the first form that supports a call and prefers to serve it, else the reference; the name of a form takes
that form, or raises with the reason why not.

`explain("rms_norm", x, scale, 1e-5)` is a text of which form serves a call, and why no other.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fzero.core.autodiff import first_order
from fzero.core.form_observer import note
from fzero.core.form_observer import observe as observe
from fzero.core.pytree import nearest

# The files that hold operations; each registers its own when it is imported.
FILES = (
    "attention",
    "attention_ring",
    "cross_entropy",
    "dropout",
    "float8",
    "float8_gather",
    "glu",
    "grad_norm",
    "linear",
    "linear_cross_entropy",
    "moe",
    "moe_float8",
    "moe_permute",
    "moe_routing",
    "newton_schulz",
    "norm",
    "optim_multi_tensor",
    "paged_attention",
    "quantize",
    "quantized_linear",
    "rope",
    "rowwise",
)
OPS: dict[str, Op] = {}


def always(*args: Any, **options: Any) -> str:
    """Supports every call: return "", no reason against."""
    return ""


def asked_for(*args: Any, **options: Any) -> str:
    """Why "auto" should not take a canonical form."""
    return "it is for kernels=canonical"


@dataclass(frozen=True)
class Form:
    """One way to compute an operation: `run` takes what the operation's reference takes."""

    name: str
    run: Callable[..., Any]
    supports: Callable[..., str] = always  # the same arguments -> "" if this form serves them, else why not
    prefers: Callable[..., str] = always  # the same arguments -> "" if "auto" should take it, else why not, as measured
    composes: bool = False  # whether it serves under vmap and where it is differentiated more than once

    def reason_against(self, args: tuple[Any, ...], options: Mapping[str, Any], plain: bool = True) -> str:
        """The reason why this form cannot serve a call, "" for none."""
        if not self.composes and not plain:
            return "it is differentiated once at most, and not under vmap or jvp"
        return self.supports(*args, **options)


def by_device(*forms: Form) -> Form:
    """The form of the first one's name and preferences that runs whichever of `forms` serves a call."""

    def supports(*args: Any, **options: Any) -> str:
        reasons = [form.supports(*args, **options) for form in forms]
        return "" if "" in reasons else "; ".join(dict.fromkeys(reasons))

    def run(*args: Any, **options: Any) -> Any:
        return next(form for form in forms if not form.supports(*args, **options)).run(*args, **options)

    return Form(forms[0].name, run, supports, forms[0].prefers)


@dataclass(frozen=True)
class Explanation:
    """Which form of an operation serves a call, why not the others, and what the call costs."""

    op: str
    chosen: str
    reasons: dict[str, str]  # of each form that was not taken
    flops: int
    bytes: int

    def __str__(self) -> str:
        """The form and its costs, and a line for each form that was passed over."""
        cost = f"{self.flops:,} FLOP, {self.bytes:,} bytes at least"
        return "\n".join(
            [
                f"{self.op}: {self.chosen} ({cost})",
                *(f"  not {name}: {reason}" for name, reason in self.reasons.items()),
            ]
        )


class Op:
    """A hot operation: calling it computes `reference(*args, **options)` by the form that `impl` names."""

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        *forms: Form,
        flops: Callable[..., int],
        bytes: Callable[..., int],
        order: Callable[..., Sequence[str]] = lambda *args, **options: (),
        expect: Callable[..., None] | None = None,
    ):
        # order: the same arguments -> names of forms in the order in which "auto" asks them; by default that in which
        # they are given. flops, bytes: the same arguments -> the least cost of a call, forward; both also serve tensors
        # without data (fake or on the meta device).
        self.expect = expect
        self.name, self.reference, self.flops, self.bytes, self.order = name, reference, flops, bytes, order
        self.forms = list(forms)
        OPS[name] = self

    def __call__(self, *args: Any, impl: str = "auto", **options: Any) -> Any:
        if self.expect is not None:
            self.expect(*args, **options)
        name, run = self.choose(impl, args, options)
        note(self.name, name)
        return run(*args, **options)

    def choose(
        self, impl: str, args: tuple[Any, ...], options: Mapping[str, Any], reasons: dict[str, str] | None = None
    ) -> tuple[str, Callable[..., Any]]:
        """(name, function) of the form that serves a call; notes in `reasons` why others do not."""
        if impl not in ("auto", "reference"):
            form = self.form(impl)
            if reason := form.reason_against(args, options, first_order()):
                raise ValueError(
                    f"{self.name}: impl={impl!r} does not serve this call: {reason}; use auto or reference"
                )
            return form.name, form.run
        if impl == "auto" and not (isinstance(args[0], Tensor) and args[0].numel() == 0):  # nothing to be fast at
            plain = first_order()
            for form in self.ordered(args, options):
                reason = form.reason_against(args, options, plain) or form.prefers(*args, **options)
                if not reason:
                    return form.name, form.run
                if reasons is not None:
                    reasons[form.name] = reason
        return "reference", self.reference

    def ordered(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> list[Form]:
        """The forms in the order in which "auto" asks them for a call."""
        names = self.order(*args, **options)
        if not names:
            return self.forms
        named = iter(sorted((form for form in self.forms if form.name in names), key=lambda f: names.index(f.name)))
        return [next(named) if form.name in names else form for form in self.forms]

    def form(self, name: str) -> Form:
        """The form of this name; raises ValueError naming those there are."""
        for form in self.forms:
            if form.name == name:
                return form
        names = ["auto", "reference", *(form.name for form in self.forms)]
        raise ValueError(f"{self.name}: impl is {name!r}{nearest(name, names)}; it must be one of {', '.join(names)}")


def op(name: str) -> Op:
    """The operation of this name; raises ValueError naming those there are."""
    for file in FILES:
        importlib.import_module(f"fzero.kernels.{file}")
    if name not in OPS:
        raise ValueError(
            f"there is no operation {name!r}{nearest(name, OPS)}; the operations are {', '.join(sorted(OPS))}"
        )
    return OPS[name]


def register(name: str, form: Form) -> None:
    """Add a form to the operation `name`, before those that are there or in place of its namesake."""
    forms = op(name).forms
    forms[:] = [form, *(existing for existing in forms if existing.name != form.name)]


def explain(name: str, *args: Any, impl: str = "auto", **options: Any) -> Explanation:
    """Which form of the operation `name` serves this call, and why not the others; nothing is computed."""
    operation, reasons = op(name), {}
    chosen, _ = operation.choose(impl, args, options, reasons)
    return Explanation(name, chosen, reasons, operation.flops(*args, **options), operation.bytes(*args, **options))


def describe(used: Mapping[str, set[str]]) -> str:
    """The record of `observe` in one line."""
    return ", ".join(f"{name}={'+'.join(sorted(forms))}" for name, forms in sorted(used.items()))


@dataclass(frozen=True)
class Kernels:
    """Which form each operation of a run takes: `default` for all, and exceptions by name."""

    default: str = "auto"
    by_op: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Kernels:
        """The choice of a text: "auto", "reference", "canonical", or e.g. "auto,attention=blocked,swiglu=reference"."""
        default, by_op = "auto", {}
        for item in filter(None, (p.strip() for p in text.split(","))):
            name, equals, form = item.partition("=")
            if equals:
                if form not in ("auto", "reference"):
                    op(name).form(form)
                by_op[op(name).name] = form
            elif item in ("auto", "reference", "canonical"):
                default = item
            else:
                raise ValueError(
                    f"kernels: {item!r} is neither auto, reference, canonical nor OPERATION=FORM, e.g. "
                    "attention=blocked"
                )
        return cls(default, tuple(sorted(by_op.items())))

    def __str__(self) -> str:
        """The text that `parse` takes."""
        return ",".join([self.default, *(f"{name}={form}" for name, form in self.by_op)])

    def __getitem__(self, name: str) -> str:
        """The `impl` for the operation of this name; raises ValueError if "canonical" has none for it."""
        impl = dict(self.by_op).get(name, self.default)
        return canonical_form(name) if impl == "canonical" else impl

    @property
    def canonical(self) -> bool:
        """Whether the numbers of a row of the forward pass depend on that row alone."""
        return self.default == "canonical"

    def refuse(self, subject: str) -> None:
        """Raise ValueError for something that has no canonical form, if these kernels are."""
        if self.canonical:
            raise ValueError(
                f"kernels=canonical: {subject} has no form whose rows depend on themselves alone; use kernels=auto, or "
                "go without it"
            )


AUTO = Kernels()
# Operations whose forms have no sum over what "canonical" fixes: they move rows, draw masks, round element by element,
# or work on gradients and states.
EXACT = (
    *("adamw", "dequantize", "dequantize_sum_requantize", "dropout_add", "grad_norm", "group", "lion", "newton_schulz"),
    *("permute", "quantize"),
)


@functools.cache
def canonical_form(name: str) -> str:
    """The `impl` of an operation under "canonical"; raises ValueError for one that has no such form."""
    if any(form.name == "canonical" for form in op(name).forms):
        return "canonical"
    if name in EXACT:
        return "auto"
    raise ValueError(
        f"kernels=canonical: {name} has no form whose rows depend on themselves alone; use kernels=auto, or what needs "
        f"no {name}"
    )

"""Options of a step: those that change speed and memory, not the mathematics, and which steps make no update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, runtime_checkable

from torch import Tensor

from fzero.core.arguments import expect_fields
from fzero.core.autodiff import Remat
from fzero.core.config_tables import Bounds, at_least, one_of
from fzero.kernels.registry import AUTO, Kernels

CAPTURE = ("auto", "off")
# Bounds of Spike's numbers.
SIGMAS: Bounds = (0.0, False, 1e6)
WINDOW: Bounds = (2, True, 1e9)  # of 1 there is no deviation
WARMUP: Bounds = (1, True, 1e9)
UPDATES = ("end", "speculate", "backward", "delayed")  # when a step updates the state


@dataclass(frozen=True)
class Execution:
    """Options that change speed and memory of a step, and at most the rounding of its numbers.

    remat: which activations are computed again in the backward pass: "none", "full", "every:K" (layers) or
        "selective:F" (keep at most the fraction F); or a Remat.
    compiled: whether blocks and losses are compiled.
    kernels: the form of each hot operation, such as "reference" or "auto,attention=blocked" (see
        fzero.kernels.registry); or a Kernels.
    prefetch: the layers whose parameters are gathered, or read, ahead of use: prefetch + 1 layers are whole at a time.
    reshard: at stage 3, whether the gathered parameters of a layer are dropped after its forward pass and gathered
        again for its backward pass; False keeps all layers whole in between.
    resident: at stage 3, or with parameters in other memories, the stages of a rank (without pp all layers are one)
        that may stay whole between micro-batches, with embedding and head if they have them. Which ones stay when, the
        schedule says (see fzero.sharding.pipeline.with_gathers), so that gathers are fewest; 0: none.
    partition_activations: with tp but no sequence parallelism, whether a rank keeps its part alone of the layer inputs
        that remat="full" or "every:K" keeps, and the ranks gather them for the backward pass: 1/tp of the memory.
    norms: whether `metrics.squares` has the sums of squares of each leaf of the gradient, for norms by layer (see
        fzero.run.measure.timer).
    capture: "auto" records a step as one CUDA graph where the GPU waits for the host to issue its operators (see
        fzero.train.capture); "off" issues every step.
    update: when a step updates the state: "end"; "speculate" (optimizer state offloaded): layer by layer in the
        backward pass, and put right exactly where the step is clipped or skipped (see Metrics); "backward" (offloaded,
        without clipping by the norm): the same, and no gradient of layers is kept; "delayed" (a plan
        `.with_updates(k)`): k updates a step, of a k-th of its micro-batches each, with gradients at the parameters
        before the last update (PipeDream-2BW: other numbers). `grad_norm` is then the largest one, and `skipped` says
        if any update was.

    Raises ValueError for a text that is none of these, a prefetch or resident below 0, and resident with reshard=False.

    >>> Execution(remat="every:2").remat.every
    2
    """

    remat: Remat | str = "none"
    compiled: bool = False
    kernels: Kernels | str = AUTO
    prefetch: Annotated[int, at_least(0)] = 1
    reshard: bool = True
    norms: bool = False
    capture: str = "off"
    resident: Annotated[int, at_least(0)] = 0
    partition_activations: bool = False
    update: str = "end"
    _layers: int = 0  # planner only: run the first layers and extrapolate; 0: all
    _dealt: bool = False  # runs only: their loader deals rows, which tiny data may have twice
    # planner only: the shapes between stages and of losses, which ranks of pp tell each other in a first step
    _known: dict[Any, Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        write = 'write remat="full" or remat="none"' if isinstance(self.remat, bool) else 'write remat="full"'
        expect_fields(
            self,
            remat=f'remat is {{}}; {write}, "every:2" or "selective:0.5"',
            compiled="compiled is {}; write compiled=True or compiled=False",
            kernels='kernels is {}; write kernels="auto" or kernels="reference"',
            prefetch="prefetch is {}; it must be a whole number of at least 0",
            reshard="reshard is {}; write reshard=True or reshard=False",
            capture='capture is {}; write capture="auto" or capture="off"',
            resident="resident is {}; it must be a whole number of at least 0",
            partition_activations="partition_activations is {}; write partition_activations=True",
        )
        if isinstance(self.remat, str):
            object.__setattr__(self, "remat", Remat.parse(self.remat))
        if isinstance(self.kernels, str):
            object.__setattr__(self, "kernels", Kernels.parse(self.kernels))
        assert isinstance(self.kernels, Kernels)  # parsed above
        if self.compiled:
            self.kernels.refuse("a compiled block, which rounds at other places,")
        one_of(CAPTURE).check("capture", self.capture)
        one_of(UPDATES, f"{', '.join(UPDATES[:-1])} or {UPDATES[-1]}").check("update", self.update)
        assert isinstance(self.remat, Remat)  # parsed above
        if self.partition_activations and not self.remat.every:
            raise ValueError(
                f"partition_activations cuts the layer inputs that remat keeps, and remat is {self.remat}; use "
                'remat="full" or "every:2"'
            )
        if self.resident and not self.reshard:
            raise ValueError(
                f"resident is {self.resident} and reshard is False, which keeps other parameters whole; leave one out"
            )


@runtime_checkable
class SpikeRule(Protocol):
    """A rule by which a loss is a spike, such as Spike."""

    def judge(self, stats: Any, loss: Tensor) -> tuple[Tensor, Any]:
        """(whether `loss` is a spike, a bool scalar; the LossStats after it). Pure, without branches: it vmaps."""
        ...


@dataclass(frozen=True)
class Skip:
    """Which steps make no update: parameters, optimizer state and averages stay as they were, and `metrics.skipped` is
    true.

    nonfinite: those whose loss or gradient is not finite, and those in whose batch nothing counts. False updates
    whatever comes, and waits for no value. spike: those whose loss is one by these numbers; None: none is.

    >>> Skip(spike=fzero.Spike(sigmas=4.0)).nonfinite
    True
    """

    nonfinite: bool = True
    spike: SpikeRule | None = None

    def __post_init__(self) -> None:
        expect_fields(self, spike="Skip: spike is {}; it must be a fzero.Spike, another SpikeRule, or None")

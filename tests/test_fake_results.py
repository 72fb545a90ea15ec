"""The results that a plan remembers are those that torch's fake tensors give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fzero.core import FakeDevice, Target, device, torch_private
from fzero.planner.step_trace import Trace, Transfer, trace_step
from fzero.run import RunConfig, from_table

GPU = Target("cuda", 132, (9, 0), "NVIDIA H100")

PROGRAMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "product": lambda x, y: x @ y,
    "product of a transpose": lambda x, y: x.t().contiguous().t() @ y,
    "transposed": lambda x, y: x.t(),
    "rows": lambda x, y: x[1:3],
    "columns": lambda x, y: x[:, 2:],
    "rows of rows": lambda x, y: x[1:][1:],
    "a row": lambda x, y: x[2],
    "reshaped": lambda x, y: x.view(-1, 2),
    "reshaped by a copy": lambda x, y: x.t().reshape(-1),
    "bytes": lambda x, y: x.view(torch.uint8),
    "strided": lambda x, y: x.as_strided((2, 2), (1, 3), 1),
    "broadcast": lambda x, y: x[:, :1] + x[:1],
    "by an int": lambda x, y: x.to(torch.int64) * 2,
    "by a float": lambda x, y: x.to(torch.int64) * 2.0,
    "by a bool": lambda x, y: x.to(torch.bool) * True,
    "by the int of a bool": lambda x, y: x.to(torch.bool) * 1,
    "in place": lambda x, y: x.mul_(2),
    "in place of a view": lambda x, y: x[1:].add_(1),
    "into": lambda x, y: torch.mm(x, y, out=x.new_empty(4, 4)),
    "parts": lambda x, y: x.split(3),
    "several": lambda x, y: torch.aminmax(x, dim=0),
    "joined": lambda x, y: torch.cat([x, y.t()]),
    "joined otherwise": lambda x, y: torch.cat([x, y.t()], 1),
    "other dtype": lambda x, y: x.to(torch.bfloat16),
    "host": lambda x, y: x.to("cpu"),
    "like": lambda x, y: torch.empty_like(x.t()),
    "expanded": lambda x, y: x[:1].expand(5, 6),
    "detached": lambda x, y: x.detach(),
    "nothing": lambda x, y: torch.ops.fzero.record_launch("fused", [x], [y]),
}


def facts(out: Any, given: tuple[Tensor, ...]) -> Any:
    """All that a step or a record may ask of a result."""
    if isinstance(out, (tuple, list)):
        return [facts(one, given) for one in out]
    if out is None:
        return None
    memory = out.untyped_storage()
    shared = [x.untyped_storage()._cdata == memory._cdata for x in given]
    return (
        out.shape,
        out.stride(),
        out.storage_offset(),
        out.dtype,
        str(out.device),
        shared,
        memory.nbytes(),
        [out is x for x in given],
    )


def arguments(mode: FakeDevice, transposed: bool) -> tuple[Tensor, Tensor]:
    """[4, 6] and [6, 4]."""
    make = lambda *shape: torch.empty(shape, device=mode.device)  # noqa: E731
    return (make(6, 4).t(), make(4, 6).t()) if transposed else (make(4, 6), make(6, 4))


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_the_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two layouts in turn, each found the second time: sizes, dtypes, devices and whose memory they have."""
    mode, program = FakeDevice(GPU), PROGRAMS[name]
    with torch.no_grad(), mode:
        found: dict[bool, list[Any]] = {False: [], True: []}
        for turned in (False, True, False, True):
            given = arguments(mode, turned)
            try:
                found[turned].append(facts(program(*given), given))
            except (RuntimeError, ValueError) as error:  # such as a view of other strides
                found[turned].append(str(error))
    assert mode.results.cache or name == "nothing"
    plain = FakeDevice(GPU)
    plain.results = lambda run, *rest: run(*rest)  # type: ignore[assignment]
    with torch.no_grad(), plain:
        for turned in (False, True):
            given = arguments(plain, turned)
            try:
                expected = facts(program(*given), given)
            except (RuntimeError, ValueError) as error:
                expected = str(error)
            assert found[turned] == [expected, expected]


def test_values_are_not_remembered() -> None:
    """A tensor whose value is known, and sizes that follow from values."""
    mode = FakeDevice()
    with torch.no_grad(), mode:
        for value in (3, 4, 3):
            assert int(torch.tensor(value) + 1) == value + 1
        x = torch.empty(4)
        for size in (2, 6, 2):
            assert x.resize_(size).shape == (size,)


def test_tensors_of_another_mode_and_real_ones_are_not_remembered() -> None:
    mode, other = FakeDevice(), torch_private.FakeTensorMode()
    with other:
        foreign = torch.empty(3)
    given: list[Any] = []
    assert device.key_of(mode, (foreign,), given) is None
    assert device.key_of(mode, [torch.empty(3)], given) is None and not given


def config(model: str, **more: Any) -> RunConfig:
    """A small run of a preset."""
    table = {"preset": model, "data": {"seq_len": 16}, "train": {"batch": 4, "micro_batch": 2, "steps": 2}}
    return from_table({**table, **more})


def numbered(trace: Trace) -> list[Any]:
    """The events, with transfers numbered from the first."""
    numbers: dict[int, int] = {}
    number = lambda e: e._replace(number=numbers.setdefault(e.number, len(numbers)))  # noqa: E731
    return [number(event) if isinstance(event, Transfer) else event for event in trace.events]


@pytest.mark.parametrize(
    ("model", "more", "sizes"),
    [
        ("llama-tiny", {"zero": 3}, {"dp": 2}),
        pytest.param("gpt2-tiny", {"zero": 1, "offload": "opt=host"}, {"dp": 2}, marks=pytest.mark.exhaustive),
        pytest.param("mixtral-tiny", {"zero": 3}, {"ep": 2}, marks=pytest.mark.exhaustive),
        pytest.param("deepseek-tiny", {"zero": 2}, {"dp": 2}, marks=pytest.mark.exhaustive),
        pytest.param(
            "llama-tiny", {"zero": 3, "precision": {"policy": "bf16_float8"}}, {"dp": 2}, marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_traced_step_is_the_same_without_the_memory(
    model: str, more: dict[str, Any], sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every event, moment and message of a planned step, with results remembered and without."""
    remembered: Trace = trace_step(config(model, **more), sizes, target=GPU)
    monkeypatch.setattr(device.FakeResults, "__call__", lambda self, run, *rest: run(*rest))
    plain: Trace = trace_step(config(model, **more), sizes, target=GPU)
    assert numbered(remembered) == numbered(plain)
    assert remembered.timeline == plain.timeline
    assert remembered.ledger == plain.ledger
    assert remembered.alive == plain.alive

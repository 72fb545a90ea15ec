"""Triton, or a stand-in on a machine without a GPU, where it need not be installed.

Kernels import `triton` and `tl` from here. Without Triton the files of this package still load, plans still count what
their kernels would do on a GPU, and only a launch raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

MISSING = "Triton is not installed; it comes with torch's CUDA build, or by `pip install triton`"


class AbsentKernel:
    """Stands for a kernel; a launch raises ImportError."""

    def __init__(self, function: Any):
        self.__name__ = function.__name__

    def __getitem__(self, grid: Any) -> NoReturn:
        raise ImportError(f"{self.__name__}: {MISSING}")


class Absent:
    """Stands for `triton` and `triton.language`: what a file needs to define its kernels and count their blocks."""

    float32, float16, bfloat16 = "fp32", "fp16", "bf16"

    def jit(self, function: Any = None, **_: Any) -> Any:
        return AbsentKernel if function is None else AbsentKernel(function)

    def constexpr(self, value: Any) -> Any:
        return value

    def cdiv(self, a: int, b: int) -> int:
        return -(-a // b)

    def next_power_of_2(self, n: int) -> int:
        return 1 << max(0, n - 1).bit_length()


# By Triton's own types a kernel takes no number where it has a `tl.constexpr`, and its language's functions return
# nothing; and it need not be installed. So a type checker is told that all of it is Any.
if TYPE_CHECKING:

    class triton(Any):
        JITFunction = Any

    class tl(Any):
        class constexpr(Any):
            def __init__(self, value: Any) -> None: ...
else:
    try:
        import triton
        import triton.language as tl
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        triton = tl = Absent()

INSTALLED = not isinstance(triton, Absent)
VERSION: tuple[int, ...] = tuple(map(int, triton.__version__.split(".")[:2])) if INSTALLED else (0, 0)
# TRITON_INTERPRET=1 before Triton's import: kernels run in Python, on any device.
INTERPRETED = INSTALLED and bool(triton.knobs.runtime.interpret)

"""The GPU of this process: which it is, its memory, events, pinned memory, and graphs of its work.

Nothing else in fzero calls torch.cuda but fzero.core.gpu_copies. Why a GPU cannot be used is one line of what PyTorch
and CUDA say.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import socket
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import torch_private

# What to do, by what is said; the last one is for all the rest.
ADVICE = {
    r"driver .*too old|insufficient for CUDA": "install a newer driver, or PyTorch for an older CUDA "
    "(https://pytorch.org/get-started/previous-versions)",
    r"no kernel image|compiled for": "install a PyTorch that was compiled for it "
    "(https://pytorch.org/get-started/previous-versions)",
    r"busy or unavailable": "another process has it alone: nvidia-smi shows which, and the GPU's compute mode",
    r"out of memory": "other processes hold its memory: nvidia-smi shows which",
    r"not yet initialized": "start the service that connects the GPUs (systemctl start nvidia-fabricmanager)",
    r"unsupported display driver|version mismatch": "the driver and its libraries are of different versions: restart "
    "the machine, or the container with the libraries of its host",
    r"": "nvidia-smi shows more",
}


def gist_of(text: str) -> str:
    """What a message of PyTorch about CUDA says: CUDA's own error, else a sentence.

    >>> gist_of("CUDA error: no kernel image is available for execution on the device\\nSearch for ...")
    'no kernel image is available for execution on the device'
    """
    text = re.sub(r"\(Triggered internally.*", "", text, flags=re.DOTALL).strip()
    numbered = re.search(r"Error \d+: (.+)", text)
    first = (numbered[1] if numbered else text).partition("\n")[0]
    first = re.sub(
        r"^(CUDA call failed lazily at initialization with error|CUDA initialization|CUDA error): ", "", first
    )
    return re.split(r"\. (?=[A-Z])", first)[0].rstrip(". ")


def advice_on(gist: str) -> str:
    """What to do about what `gist_of` found, and how to train without a GPU."""
    advice = next(advice for pattern, advice in ADVICE.items() if re.search(pattern, gist, re.IGNORECASE))
    return f"{advice}; device=cpu (--device cpu) trains without it"


def is_compiled_for(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether code for `architectures`, such as sm_90 and compute_120, runs on a GPU of a compute capability.

    >>> is_compiled_for((8, 9), ["sm_80", "sm_90"]), is_compiled_for((7, 0), ["sm_75", "sm_80"])
    (True, False)
    """
    # Machine code (sm) runs on later GPUs of the same generation, that of sm_90a on its own alone; an intermediate code
    # (compute) is compiled for any later one. Ref: NVIDIA, CUDA C++ Programming Guide, "Binary Compatibility".
    for name in architectures:
        form = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if form is None:
            return True  # of a kind that this function does not know
        target = int(form[2]), int(form[3])
        if form[4] == "a":
            runs = capability == target
        elif form[1] == "compute":
            runs = capability >= target
        else:
            runs = capability[0] == target[0] and capability >= target
        if runs:
            return True
    return not architectures


HOST = torch.device("cpu")
# PyTorch's settings of its GPU allocator; the second name is that of 2.9 and later, which reads both.
# Segments that grow in place lose less memory to fragments where sizes vary (compiled blocks, evaluations).
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
KINDS = ("auto", "cpu", "cuda")  # values of a config's `device`; AMD's GPUs are "cuda" to PyTorch too


# ---- which device ----


_COMPLAINTS: list[str] = []  # PyTorch says them once in a process


def generators() -> tuple[torch.Generator, ...]:
    """The generators of random numbers of the GPUs that this process uses; () while a graph is captured."""
    if not torch.cuda.default_generators or torch.cuda.is_current_stream_capturing():
        return ()
    return tuple(torch.cuda.default_generators)


def count_gpus() -> int:
    """The number of GPUs that PyTorch can use on this machine; 0 on a CPU build. See `complaint`.

    >>> count_gpus() >= 0
    True
    """
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for warning in messages:
        if str(warning.message).startswith("CUDA"):
            _COMPLAINTS.append(gist_of(str(warning.message)))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return count


def complaint() -> str:
    """Why `count_gpus` found none, such as a driver that is too old; "" if CUDA complained of nothing."""
    return _COMPLAINTS[-1] if _COMPLAINTS else ""


def resolve_device(name: str) -> str:
    """ "cpu" or "cuda": what `name` or "auto" is here; raises ValueError for others.

    >>> resolve_device("cpu")
    'cpu'
    """
    if name not in KINDS:
        raise ValueError(f"device is {name!r}; it must be one of {', '.join(KINDS)}")
    if name != "auto":
        return name
    return "cuda" if count_gpus() else "cpu"


def local_rank() -> int:
    """The number of this process among those of its host, by torchrun's LOCAL_RANK; 0 without it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_device(kind: str) -> torch.device:
    """The device of this process: the CPU, or the GPU of its local rank. It touches no GPU."""
    return HOST if kind == "cpu" else torch.device(kind, local_rank())


def use_device(kind: str, processes: int = 1) -> torch.device:
    """Make the device of this process the current one, and return it; raises ValueError for one it cannot use."""
    if kind == "cpu":
        return HOST
    count = count_gpus()
    if not count and (reason := complaint()):
        raise ValueError(f"device is cuda and PyTorch can use no GPU here: {reason}; {advice_on(reason)}")
    if not count:
        raise ValueError(
            "device is cuda and PyTorch finds no GPU here; use device=cpu (--device cpu), or a CUDA build of PyTorch"
        )
    if max(processes, local_rank() + 1) > count:
        raise ValueError(
            f"device is cuda and {max(processes, local_rank() + 1)} processes of this host share {count} "
            f"GPU{'s' * (count > 1)}; a process takes a GPU of its own: start {count} a host "
            f"(torchrun --nproc-per-node {count}), or use device=cpu (--device cpu)"
        )
    device = local_device(kind)
    if not any(os.environ.get(name) for name in ALLOCATOR_SETTINGS):  # read once, when PyTorch begins to use the GPU
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
    select_device(device)
    return device


def widen_queues() -> None:
    """Have a GPU keep its streams apart, up to 32 of them; call it before the GPU is used."""
    # CUDA puts streams into 8 queues, and in a queue what waits holds up the streams behind it. A pipeline has receives
    # that wait for another rank, on a stream for each channel.
    os.environ.setdefault(QUEUES, "32")


def select_device(device: torch.device) -> None:
    """Make a GPU the current one of this process, and begin to use it; nothing for a CPU."""
    if device.type == "cuda":
        with _first_use(device):
            torch.cuda.set_device(device)
            torch.cuda.init()


def wake(device: torch.device) -> None:
    """Begin to use a GPU if `device` is one, so that `in_use` says so."""
    if device.type == "cuda":
        with _first_use(device):
            torch.cuda.init()


@contextlib.contextmanager
def _first_use(device: torch.device) -> Iterator[None]:
    """A context that begins to use a GPU; raises ValueError with one line for what CUDA says against it."""
    if in_use():
        yield
        return
    try:
        with warnings.catch_warnings():  # PyTorch's many lines about a GPU that its build does not serve
            warnings.filterwarnings("ignore", r"(?s).*cuda capability")
            yield
        compiled = torch.cuda.get_arch_list() if torch.version.hip is None else []
        device_info = properties(device) if compiled else None
        if device_info is not None and not is_compiled_for((device_info.major, device_info.minor), compiled):
            raise RuntimeError(
                f"its compute capability is {device_info.major}.{device_info.minor}, and PyTorch {torch.__version__} "
                f"was compiled for {', '.join(compiled)}"
            )
        compute_once(device)
    except RuntimeError as error:
        gist = gist_of(str(error))
        name = f"GPU {device.index or 0} of host {socket.gethostname()}"
        raise ValueError(f"{name} cannot be used: {gist}; {advice_on(gist)}") from None


def compute_once(device: torch.device) -> None:
    """Compute a number on a GPU and wait: some faults show only then."""
    torch.ones((), device=device).add_(1)
    synchronize(device)


def current_device() -> torch.device:
    """The device of the calling thread: its current GPU, or the CPU if this process uses no GPU."""
    # A new thread begins with GPU 0, whichever its process uses; `select_device` tells it.
    return torch.device("cuda", torch.cuda.current_device()) if in_use() else HOST


def in_use() -> bool:
    """Whether this process uses a GPU; it does not begin to."""
    return torch.cuda.is_initialized()


def describe_device(device: torch.device) -> str:
    """The device in words: "the CPU", or the GPU with its number and name."""
    return "the CPU" if device.type == "cpu" else f"GPU {device.index or 0}, {torch.cuda.get_device_name(device)}"


def properties(device: torch.device) -> Any:
    """PyTorch's description of a GPU: name, multi_processor_count, major, minor, total_memory."""
    return torch.cuda.get_device_properties(device)


def pci_address(device: torch.device) -> str:
    """The address of a GPU on the host's PCI bus, such as "0000:3b:00.0"; "" if PyTorch does not tell."""
    device_info = properties(device)
    numbers = [getattr(device_info, f"pci_{field}_id", None) for field in ("domain", "bus", "device")]
    return "" if None in numbers else "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which `device` is the current GPU, as launches of Triton need; nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a GPU records a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# ---- memory ----


class DeviceMemory(NamedTuple):
    """The memory of a GPU, in bytes."""

    total: int
    free: int  # held by no process
    tensors: int  # of this process
    reserved: int  # by this process's allocator, for its tensors and for later ones
    peak: int  # the most that tensors of this process have held since `reset_peak`

    @property
    def external(self) -> int:
        """The memory that other processes and the driver hold."""
        return max(0, self.total - self.free - self.reserved)


def memory_of(device: torch.device) -> DeviceMemory:
    """The memory of a GPU now, by its driver and this process's allocator, without a wait."""
    free, total = torch.cuda.mem_get_info(device)
    tensors, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return DeviceMemory(total, free, tensors, reserved, torch.cuda.max_memory_allocated(device))


def free_bytes(device: torch.device) -> int:
    """The memory of a GPU that this process can still have: free, and unused in its allocator."""
    memory = memory_of(device)
    return memory.free + memory.reserved - memory.tensors


def processes_on(device: torch.device) -> list[str]:
    """The other processes that hold memory of a GPU, such as "python (process 4242)"; [] if unknown."""
    program, uuid = shutil.which("nvidia-smi"), getattr(properties(device), "uuid", None)
    if program is None or uuid is None:
        return []
    command = [program, f"--id=GPU-{uuid}", "--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.partition(",") for line in lines if line.partition(",")[0].strip().isdecimal()]
    return [
        f"{os.path.basename(name.strip())} (process {pid.strip()})" for pid, _, name in rows if int(pid) != os.getpid()
    ]


def peak_bytes(device: torch.device) -> int | None:
    """The most memory of tensors on a GPU since `reset_peak`; None for a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    """Begin to count the peak of a GPU's memory anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def pin_pages(address: int, size: int) -> tuple[int, Callable[[], None]]:
    """Pin memory for all GPUs: (CUDA's error code, the function that unpins it)."""
    runtime = torch.cuda.cudart()
    assert runtime is not None  # there is a GPU
    everywhere = 1  # cudaHostRegisterPortable
    return int(runtime.cudaHostRegister(address, size, everywhere)), lambda: runtime.cudaHostUnregister(address)


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """`x`, a host tensor, pinned if `device` is a GPU."""
    return x.pin_memory() if device.type == "cuda" else x


# ---- order ----


def synchronize(device: torch.device) -> None:
    """Wait until all that was given to a GPU is done; on a CPU it is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark_time(spare: list[Any] | None = None) -> Any:
    """A moment in the work of the current stream, an event; spare: old ones to use again."""
    # Old events are used again, as the driver takes its time to make one.
    event = spare.pop() if spare else torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def product_rate(dtype: torch.dtype, device: torch.device, side: int = 8192, times: int = 10) -> float:
    """The FLOP/s of square products on a GPU, timed by its own clock."""
    # Of random numbers: products of ones take less power, and run at a higher clock than any training does.
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    for _ in range(3):
        torch.mm(a, b)
    first = mark_time()
    for _ in range(times):
        torch.mm(a, b)
    last = mark_time()
    synchronize(device)
    return 2.0 * side**3 * times / (first.elapsed_time(last) / 1e3)


# ---- one graph ----


@functools.cache
def _capture_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def on_capture_stream(device: torch.device, inputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """A context on the stream that `record_graph` records on, ordered with the current stream at both ends."""
    stream, current = _capture_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    outputs: list[Tensor] = []
    try:
        with torch.cuda.stream(stream):
            yield outputs
    finally:
        current.wait_stream(stream)  # before anything of `given` is freed
    for x in outputs:
        x.record_stream(current)  # its memory is the other stream's


def record_graph(work: Callable[[], Any], device: torch.device, pool_graph: Any = None) -> tuple[Any, Any]:
    """(the CUDA graph of what `work()` gives the GPU, what it returned); raises RuntimeError for a wait in it."""
    # What `work` made is in memory of the graph, and overwritten by the next replay. pool_graph: may share that memory,
    # as no two graphs run at one time.
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    pool = torch.cuda.graph_pool_handle() if pool_graph is None else pool_graph.pool()
    # Other threads pin memory and wait for copies meanwhile, as those of a checkpoint do; and so does this one where a
    # kernel takes a table of addresses. A wait for what is recorded is an error all the same.
    options = {"stream": _capture_stream(device), "capture_error_mode": "relaxed"}
    try:
        # torch.cuda.graph leaves its own stream the current one where the end of a recording fails.
        with torch.cuda.stream(current), torch.cuda.graph(graph, pool=pool, **options):
            result = work()
    except BaseException:
        _abandon_recording(graph, device, pool)
        raise
    return graph, result


_ABANDONED: list[Any] = []  # PyTorch's allocator of pinned memory goes on asking these graphs whether a stream records


def _abandon_recording(graph: Any, device: torch.device, pool: Any) -> None:
    """Give back the memory of a recording that failed, which PyTorch keeps."""
    # As long as PyTorch's allocator takes a recording to be under way, it frees nothing that another stream has used.
    index = device.index or 0
    try:
        torch_private.end_allocate_to_pool(index, pool)
    except RuntimeError:  # the recording was ended in order
        graph.reset()
        return
    torch_private.release_pool(index, pool)
    _ABANDONED.append(graph)

"""A pretend GPU: tensors over CPU memory that say they are on cuda:0, with streams and events as vector clocks.

    with pretend() as gpu:
        state, metrics = train_step(state, batch)     # unchanged; state and batch were made on "cuda" in here
    assert not gpu.waits and not gpu.races

An operator runs at once on CPU memory, so its bits are the CPU's. What a GPU would have done beside it is known from
the clocks: a stream is in order; a kernel comes behind what the host did before its launch; the host is behind a stream
only where it waits; a stream is behind another one only by an event or wait_stream. From that follow, with the line of
fzero:

  waits     of the host for the device: item(), copies that block, event.synchronize(), data-dependent shapes
  idle      those of them after which the device has computed all that it was given
  unpinned  copies between the device and memory of the host that is not pinned
  races     two accesses to the same bytes, one of them a write, in no order
  freed     memory given back while a stream that is not its own may still use it: no record_stream; or unpinned while
            any stream may

It counts the bytes of pinned memory: `registered`, those that cudaHostRegister pins, and `cached`, those that PyTorch's
allocator takes, in powers of two, which it lends again and never gives back.

and an operator that is given tensors of both devices raises, as on a GPU.

Another thread is a host of its own: it is behind the device only where it waits itself, and its waits are in
`waits_beside`. What threads do to memory is taken to be in the order in which they ran; who takes memory from a pool
is behind what those waited for who gave it back, and behind what the host did. Operators on the host's tensors are seen
in the thread of the context alone, and what a disk's threads read and write; a test tells of the rest by `on_host`.
"""

import contextlib
import sys
import threading
import types
import weakref
from collections import Counter

import pretend_graph
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
UNDERNEATH = torch.device("cpu", 0)  # which C++ takes the device to be
aten = torch.ops.aten
# Operators whose result's shape depends on values: the host must know them.
SHAPES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.equal.default,
    aten.bincount.default,
}
MAKERS = (
    "empty",
    "empty_like",
    "zeros",
    "ones",
    "full",
    "arange",
    "tensor",
    "as_tensor",
    "randn",
    "rand",
    "randint",
    "eye",
)
UNWRITTEN = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
OWN = ("core/gpu.py", "core/gpu_copies.py", "core/copy_buckets.py", "core/gpu_copies.py")
WHOLE = None  # the pretend GPU of the context under way


def line_of_fzero():
    """The innermost line of fzero that runs and is not core's own waiting; else that of a test."""
    frame, test = sys._getframe(2), "?"
    while frame is not None:
        name = frame.f_code.co_filename
        if "/fzero/" in name and not name.endswith(OWN):
            return f"{name.rpartition('/fzero/')[2]}:{frame.f_lineno}"
        if "/tests/test_" in name and test == "?":
            test = f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return test


class GpuTensor(Tensor):
    """A tensor of the pretend device; `under` is the CPU tensor whose memory it has."""

    @staticmethod
    def __new__(cls, under):
        x = Tensor._make_subclass(cls, under, False, dispatch_device=True, device_for_backend_keys=UNDERNEATH)
        x.under = under
        WHOLE.born(under)
        return x

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return WHOLE.run(func, args, kwargs or {})

    def get_device(self):
        return 0

    def is_pinned(self, *_):
        return False

    def pin_memory(self):
        raise RuntimeError("cannot pin a tensor of cuda")

    def cpu(self):
        return self.to("cpu")

    def numpy(self, *_, **__):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self):
        return self.to("cpu").tolist()

    def item(self):
        return WHOLE.run(aten._local_scalar_dense.default, (self,), {})

    def __float__(self):
        return float(self.item())

    def __int__(self):
        return int(self.item())

    def __bool__(self):
        return bool(self.item())

    __index__ = __int__

    def record_stream(self, stream):
        if self.numel():
            WHOLE.memory_of(self.under).users.add(stream.number)


def under(x):
    return x.under if isinstance(x, GpuTensor) else x


def join(clock, other):
    for actor, tick in other.items():
        clock[actor] = max(clock.get(actor, 0), tick)
    return clock


class Stream:
    def __init__(self, device=None, number=None):
        self.number = len(WHOLE.clocks) if number is None else number
        WHOLE.clocks.setdefault(self.number, {})

    def wait_stream(self, other):
        if WHOLE.recording is not None:
            WHOLE.recording.follow(self.number, other.number)
        join(WHOLE.clocks[self.number], WHOLE.clocks[other.number])

    def wait_event(self, event):
        if WHOLE is None:  # of a copy that is dropped behind the context
            return
        if WHOLE.recording is not None:
            WHOLE.recording.follow(self.number, event.stream)
        join(WHOLE.clocks[self.number], event.clock)

    def record_event(self):
        event = Event()
        event.record(self)
        return event

    def __eq__(self, other):
        return isinstance(other, Stream) and self.number == other.number

    def __hash__(self):
        return self.number


class Event:
    def __init__(self, enable_timing=False, blocking=False):
        self.clock, self.stream = {}, None

    def query(self):
        """Whether this thread has waited for it: it may not have happened yet, for all that is known."""
        return all(WHOLE.host.get(actor, 0) >= tick for actor, tick in self.clock.items())

    def record(self, stream=None):
        self.stream = WHOLE.current if stream is None else stream.number
        self.clock = dict(join(WHOLE.clocks[self.stream], WHOLE.host))

    def synchronize(self):
        WHOLE.wait("event.synchronize", self.clock)

    def elapsed_time(self, other):
        return 1.0


class Memory:
    """What is known of a storage: the stream it was allocated on (None: the host's, pinned), its accesses so far, and
    the streams that record_stream named."""

    def __init__(self, stream, size=0):
        self.stream, self.line, self.accesses, self.users, self.size = stream, line_of_fzero(), [], set(), size
        self.graph = None if WHOLE is None else WHOLE.recording  # whose memory it is


class PretendGpu(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.clocks, self.hosts, self.streams = {0: {}}, {threading.get_ident(): {"host": 1}}, {}
        self.thread, self.lock = threading.get_ident(), threading.RLock()
        self.memory, self.pages, self.recording = {}, {}, None
        self.live, self.unseen = Counter(), []  # bytes of tensors by stream; (bytes, stream, clock) freed, see `gone`
        self.cached, self.spare, self.given_back = 0, Counter(), {}
        self.pools, self.allocating, self.refused = {}, [], ""  # graphs of each pool; pools that are recorded into
        self.forget()

    def forget(self):
        """Begin to count anew."""
        self.waits, self.idle, self.unpinned, self.races, self.freed, self.kernels = (Counter() for _ in range(6))
        self.waits_beside = Counter()
        self.peak = self.peak_ahead = sum(self.live.values())  # bytes; the latter if the host never waits for the GPU
        self.stream_peaks = Counter(self.live)  # the most bytes of each, whose memory no other one is given

    # ---- order

    @property
    def host(self):
        """The clock of the thread that asks."""
        return self.hosts.setdefault(threading.get_ident(), {})

    @property
    def current(self):
        """The number of the current stream of the thread that asks."""
        return self.streams.get(threading.get_ident(), 0)

    def wait(self, why, clock):
        if self.recording is not None and threading.get_ident() == self.thread:
            self.refused = f"operation not permitted when stream is capturing: {why}"
            raise RuntimeError(self.refused)
        here = threading.get_ident() == self.thread
        (self.waits if here else self.waits_beside)[why, line_of_fzero()] += 1
        self.idle[why, line_of_fzero()] += here and clock.get(0, 0) >= self.clocks[0].get(0, 0)
        join(self.host, clock)

    def launch(self, reads=(), writes=()):
        """A kernel of the current stream."""
        with self.lock:
            clock = join(self.clocks[self.current], self.host)
            clock[self.current] = clock.get(self.current, 0) + 1
            self.kernels[self.current] += 1
            self.touch(self.current, clock, reads, writes)

    def on_host(self, reads=(), writes=()):
        """The host reads and writes memory, without an operator that is seen."""
        with self.lock:
            self.host["host"] = self.hosts[self.thread]["host"] = self.hosts[self.thread]["host"] + 1
            self.touch("host", self.host, reads, writes)

    def touch(self, actor, clock, reads, writes):
        line = line_of_fzero()
        for write, tensors in ((False, reads), (True, writes)):
            for x in tensors:
                memory = self.memory_of(x)
                if memory is not None and x.numel():
                    self.access(memory, x, write, (actor, clock[actor], line), clock)

    def access(self, memory, x, write, by, clock):
        low = x.data_ptr()
        high = low + (sum((n - 1) * abs(step) for n, step in zip(x.shape, x.stride())) + 1) * x.element_size()
        kept, accesses = [], memory.accesses
        if self.recording is not None:  # nothing runs: what it will do is compared among itself
            accesses = self.recording.accesses.setdefault(id(memory), [])
        for entry in accesses:
            start, end, wrote, other, tick, line = entry
            ordered = clock.get(other, 0) >= tick
            if start < high and low < end and (write or wrote) and not ordered:
                pair = [f"{'write' if w else 'read'} by {a} at {at}" for w, a, at in (
                    (wrote, other, line), (write, by[0], by[2]))]  # fmt: skip
                self.races[" | ".join(pair)] += 1
            covered = low <= start and end <= high and (write or not wrote)
            if not (ordered and covered):
                kept.append(entry)
        accesses[:] = [*kept, (low, high, write, *by)]

    # ---- memory

    def memory_of(self, x):
        found = self.memory.get(x.untyped_storage()._cdata)
        if found is None and self.pages:  # of a pool that is pinned as a whole
            found = next((m for start, (end, m) in self.pages.items() if start <= x.data_ptr() < end), None)
        return found

    def cudaHostRegister(self, address, size, flags):
        self.pages[address] = (address + size, Memory(None))
        return 0

    def cudaHostUnregister(self, address):
        _, memory = self.pages.pop(address)
        known = join(dict(self.host), self.given_back)  # to who gave back the memory's parts
        for *_, actor, tick, line in memory.accesses:
            if actor != "host" and known.get(actor, 0) < tick:
                self.freed[f"of the host, from {memory.line}, used by stream {actor} at {line}"] += 1

    @property
    def registered(self):
        return sum(end - start for start, (end, _) in self.pages.items())

    def born(self, x, stream=0):
        key = x.untyped_storage()._cdata
        if key not in self.memory and x.data_ptr():
            nbytes, spare = x.untyped_storage().nbytes(), 0
            memory = self.memory[key] = Memory(self.current if stream is not None else None, nbytes)
            if stream is None:
                spare = 1 << (nbytes - 1).bit_length()
                self.spare[spare] -= 1
                if self.spare[spare] < 0:
                    self.spare[spare] = 0
                    self.cached += spare
            weakref.finalize(x.untyped_storage(), self.gone, key, spare).atexit = False
            if memory.stream is not None:
                self.allocate(memory.stream, nbytes)

    def allocate(self, stream, size):
        """Count new memory: what record_stream named is not given out again before the host has seen that stream come
        so far, as PyTorch's allocator asks at the next allocation."""
        with self.lock:
            self.unseen = [(n, s, ticks) for n, s, ticks in self.unseen if not self.has_seen(ticks)]
            self.live[stream] += size
            live = sum(self.live.values())
            held = Counter()
            for n, s, _ in self.unseen:
                held[s] += n
            self.peak = max(self.peak, live)
            self.peak_ahead = max(self.peak_ahead, live + sum(held.values()))
            self.stream_peaks[stream] = max(self.stream_peaks[stream], self.live[stream] + held[stream])

    def has_seen(self, ticks):
        """Whether the host has waited until streams came so far."""
        return all(self.hosts[self.thread].get(actor, 0) >= tick for actor, tick in ticks.items())

    def gone(self, key, size=0):
        self.spare[size] += 1
        memory = self.memory.pop(key, None)
        if memory is None or memory.stream is None:
            return
        with self.lock:
            self.live[memory.stream] -= memory.size
            ticks = {user: self.clocks[user].get(user, 0) for user in memory.users - {memory.stream}}
            if ticks:
                self.unseen.append((memory.size, memory.stream, ticks))
        if memory.graph is not None:
            return
        # It is behind what the streams that record_stream named were given so far, which may have waited for others.
        next_owner = join(dict(self.clocks[memory.stream]), self.host)
        for user in memory.users:
            join(next_owner, self.clocks[user])
        for *_, actor, tick, line in memory.accesses:
            safe = actor in ("host", memory.stream) or next_owner.get(actor, 0) >= tick
            if not safe:
                self.freed[f"of stream {memory.stream}, from {memory.line}, used by stream {actor} at {line}"] += 1

    def pinned(self, x):
        memory = self.memory_of(x)
        return memory is not None and memory.stream is None

    def pin(self, x):
        self.born(x, None)
        return x

    # ---- graphs

    def record(self, run, reads, writes):
        """Enter `run`, which does what is done now with these tensors, into the graph that is being recorded."""
        if self.recording is not None:
            self.recording.add(run, [*map(under, reads)], [*map(under, writes)])

    def end_allocate_to_pool(self, device, pool):
        if pool not in self.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.allocating.remove(pool)

    def release_pool(self, device, pool):
        self.pools[pool] -= 1
        assert self.pools[pool] >= 0, "given back twice"

    # ---- copies

    def copy(self, target, source, non_blocking):
        """Copy between the devices; both are there."""
        inward = isinstance(target, GpuTensor)
        host = source if inward else target
        pinned, run = self.pinned(host) or not host.numel(), lambda: under(target).copy_(under(source))
        self.record(run, [source], [target])
        with _disable_current_modes():
            run()
        if not pinned:
            self.unpinned["to the device" if inward else "to the host", line_of_fzero()] += 1
        if pinned and non_blocking:
            self.launch([under(source)], [under(target)])
        elif inward:
            self.on_host([host])
            self.launch([], [target.under])
            self.wait("copy to the device", self.clocks[self.current])
        else:
            self.launch([source.under])
            self.wait("copy to the host", self.clocks[self.current])
            self.on_host([], [host])
        return target

    def move(self, x, device, dtype, non_blocking):
        """x.to(device), from one device to the other."""
        with _disable_current_modes():
            there = torch.empty_like(under(x), dtype=dtype, device=CPU)
        if device.type == "cuda":
            return self.copy(GpuTensor(there), x, non_blocking)
        return self.copy(self.pin(there) if non_blocking else there, x, non_blocking)

    # ---- operators

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func, args, kwargs):
        if func is torch.ops.prim.device.default:
            return UNDERNEATH
        name = func._schema.name.partition("::")[2]
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        ours = [x for x in tensors if isinstance(x, GpuTensor)]
        if any(x.is_meta for x in tensors):
            return func(*args, **kwargs)
        if func is aten.copy_.default and isinstance(args[0], GpuTensor) != isinstance(args[1], GpuTensor):
            return self.copy(args[0], args[1], kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        if func is aten._local_scalar_dense.default and ours:
            self.launch([ours[0].under])
            self.wait("item", self.clocks[self.current])
            return func(ours[0].under)
        if func is aten._to_copy.default and kwargs.get("device") is not None:
            device = kwargs["device"]
            if bool(ours) != (device.type == "cuda" or device == UNDERNEATH):
                return self.move(args[0], CPU if ours else CUDA, kwargs.get("dtype"), kwargs.get("non_blocking", False))
        # A tensor that autograd itself makes, such as a zero for a gradient that is missing.
        ours = ours or kwargs.get("device") == UNDERNEATH
        if ours:
            self.expect_one_device(func, name, tensors)
        if ours and func in SHAPES:
            self.wait(name, self.clocks[self.current])
        return self.compute(func, name, args, kwargs, tensors, ours)

    def expect_one_device(self, func, name, tensors):
        for x in tensors:
            pointwise = torch.Tag.pointwise in func.tags or name in ("where", "clamp", "lerp")
            if not isinstance(x, GpuTensor) and not (x.dim() == 0 and pointwise):
                raise RuntimeError(f"tensors of cuda:0 and cpu in {name} at {line_of_fzero()}")

    def compute(self, func, name, args, kwargs, tensors, ours):
        if ours and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": CPU}
        # A number of the host's, in a tensor, is an argument of the kernel: a graph has the value of now.
        bare = under if self.recording is None else lambda x: x.clone() if type(x) is Tensor else under(x)
        args, kwargs, given = tree_map(bare, args), tree_map(bare, kwargs), (args, kwargs)
        schema = func._schema.arguments
        given = [*zip(schema, given[0]), *((a, given[1][a.name]) for a in schema if a.name in given[1])]
        altered = [x for a, value in given if a.alias_info is not None and a.alias_info.is_write
                   for x in tree_flatten(value)[0] if isinstance(x, Tensor)]  # fmt: skip
        viewed = any(a.alias_info is not None and not a.alias_info.is_write for a in schema)
        launched = altered or not (viewed or name in UNWRITTEN)
        if self.recording is not None:
            self.recording.keep(map(under, altered))
        made = multiply(func, name, args, kwargs)
        known = {id(under(x)): x for x in tensors}
        fresh = [x for x in tree_flatten(made)[0] if isinstance(x, Tensor) and id(x) not in known]
        out = tree_map(
            lambda x: known.get(id(x)) if id(x) in known else GpuTensor(x) if ours and isinstance(x, Tensor) else x,
            made,
        )
        if launched:
            reads, writes = (
                [under(x) for x in tensors if all(x is not w for w in altered)],
                [*map(under, altered), *fresh],
            )
            (self.launch if ours else self.on_host)(reads, writes)
            if ours and self.recording is not None:
                self.recording.add(lambda: again(fresh, made, multiply(func, name, args, kwargs)), reads, writes)
        return out

    # ---- torch's own functions, which look at the device before an operator is dispatched

    def maker(self, make):
        def made(*args, **kwargs):
            pin, device = kwargs.pop("pin_memory", False), kwargs.get("device")
            if device is None or torch.device(device).type != "cuda":
                x = make(*args, **kwargs)
                return self.pin(x) if pin else x
            x = make(*map(under, args), **{**kwargs, "device": CPU})
            if make.__name__ in ("tensor", "as_tensor"):
                return self.move(x, CUDA, None, False)
            x = GpuTensor(x)
            if make.__name__ not in UNWRITTEN:
                self.launch([], [x.under])
                if self.recording is not None:
                    with _disable_current_modes():
                        value = x.under.clone()
                    self.record(lambda: x.under.copy_(value), [], [x])
            return x

        return made

    def to(self, plain):
        def to(x, *args, **kwargs):
            like = next((a for a in args if isinstance(a, Tensor)), None)
            device = next((torch.device(a) for a in args if isinstance(a, (str, torch.device))), kwargs.get("device"))
            device = like.device if like is not None else None if device is None else torch.device(device)
            dtype = next((a for a in args if isinstance(a, torch.dtype)), kwargs.get("dtype"))
            dtype = like.dtype if like is not None else dtype
            if type(x) not in (Tensor, GpuTensor) or device is None or device.type == "meta":
                return plain(x, *args, **kwargs)
            if (device.type == "cuda") != isinstance(x, GpuTensor):
                return self.move(x.detach(), device, dtype, kwargs.get("non_blocking", False))
            rest = {n: kwargs[n] for n in ("copy", "memory_format") if n in kwargs}
            return plain(x, dtype or x.dtype, **rest)

        return to

    @contextlib.contextmanager
    def on_stream(self, stream):
        before, thread = self.current, threading.get_ident()
        self.streams[thread] = stream.number
        try:
            yield
        finally:
            self.streams[thread] = before


def again(fresh, made, new):
    """Put what an operator made at a replay into the memory of what it made when it was recorded."""
    own = {id(x) for x in fresh}
    for x, y in zip(tree_flatten(made)[0], tree_flatten(new)[0]):
        if id(x) in own:
            x.copy_(y)


def multiply(func, name, args, kwargs):
    """An operator on CPU tensors; a product into a wider dtype, which the CPU has not, of widened factors."""
    wide = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)), None)
    if name not in ("mm", "addmm", "bmm", "baddbmm") or wide is None:
        return func(*args, **kwargs)
    result = getattr(torch, name)(*(x.to(wide) for x in args if isinstance(x, Tensor)))
    return kwargs["out"].copy_(result) if "out" in kwargs else result


@contextlib.contextmanager
def pretend():
    """A context in which PyTorch has one GPU, the pretend one."""
    global WHOLE
    from fzero.checkpoint import manifest
    from fzero.core import device, gpu, gpu_copies, torch_private
    from fzero.offload import BufferPool, disk_io
    from fzero.optim import norm

    found, take, give_back = PretendGpu(), BufferPool.allocate, BufferPool._return
    given_back = found.given_back

    def taken(pool, *args):
        buffer = take(pool, *args)
        join(found.host, given_back)
        found.host["host"] = found.hosts[found.thread]["host"]  # of threads that had it before
        return buffer

    def returned(pool, *args):
        join(given_back, found.host)
        give_back(pool, *args)

    transfer = disk_io._transfer

    def seen_transfer(write, fd, view, *rest):
        memory, run = torch.frombuffer(view, dtype=torch.uint8), transfer(write, fd, view, *rest)
        asked = dict(found.host)

        def seen():
            moved = run()
            join(found.host, asked)
            found.on_host([memory] * write, [memory] * (not write))
            join(given_back, found.host)  # it drops its part of the buffer
            return moved

        return seen

    properties = types.SimpleNamespace(
        name="Pretend H200", multi_processor_count=132, major=9, minor=0, total_memory=149 << 30
    )
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "set_device": lambda device: None,
        "current_device": lambda: 0,
        "device": lambda device: contextlib.nullcontext(),
        "get_device_properties": lambda device: properties,
        "get_device_name": lambda device: properties.name,
        "cudart": lambda: found,
        "Stream": Stream,
        "Event": Event,
        "stream": found.on_stream,
        "current_stream": lambda device=None: Stream(number=found.current),
        "is_current_stream_capturing": lambda: found.recording is not None and threading.get_ident() == found.thread,
        "CUDAGraph": lambda: pretend_graph.Graph(found),
        "graph": pretend_graph.recording,
        "graph_pool_handle": object,
        "synchronize": lambda device: [found.wait("synchronize", clock) for clock in [*found.clocks.values()]],
        "mem_get_info": lambda device: (140 << 30, 149 << 30),
        "memory_reserved": lambda device: 0,
        "memory_allocated": lambda device: 0,
        "max_memory_allocated": lambda device: 0,
        "reset_peak_memory_stats": lambda device: None,
    }
    with contextlib.ExitStack() as stack:

        def put(where, name, value):
            stack.callback(setattr, where, name, getattr(where, name))
            setattr(where, name, value)

        for name, answer in answers.items():
            put(torch.cuda, name, answer)
        for name in MAKERS:
            put(torch, name, found.maker(getattr(torch, name)))
        for name in ("end_allocate_to_pool", "release_pool"):
            put(torch_private, name, getattr(found, name))
        put(Tensor, "to", found.to(Tensor.to))
        put(Tensor, "pin_memory", lambda x: x if found.pinned(x) else found.pin(x.clone()))
        put(Tensor, "is_pinned", lambda x: found.pinned(x))
        # The forms of a GPU are Triton's, which read memory by its address: tests/laws.py checks their numbers.
        put(BufferPool, "allocate", taken)
        put(BufferPool, "_return", returned)
        put(disk_io, "_transfer", seen_transfer)
        put(norm, "_by_kernel", lambda leaves, dtype: False)
        check = manifest.kind_fault  # which refuses subclasses of Tensor
        put(manifest, "kind_fault", lambda leaf: check(under(leaf)))
        caches = gpu_copies._copy_streams, gpu_copies._snapshots, gpu_copies._sources
        for cache in (*caches, gpu._capture_stream, device.target_on):
            cache.cache_clear()
            stack.callback(cache.cache_clear)
        stack.callback(setattr, sys.modules[__name__], "WHOLE", WHOLE)
        WHOLE = found
        with found:
            yield found

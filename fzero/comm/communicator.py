"""Links: how the ranks of one mesh axis send each other plain tensors, below functorch and autograd.

Three transports: gloo, NCCL, and a fake one without a process group, for planning on fake tensors. The differentiable collectives stand on
this (fzero/comm/collectives.py).

gloo's own collectives copy much and its reductions are slow (4 ranks on 2 cores, 12 MB: reduce_scatter_tensor 60 ms, point-to-point
messages and one local sum 14 ms). So on gloo pieces go straight to where they belong, and the receiver adds them in the order of a balanced
binary tree over ranks: a sum over ranks is bitwise the same, however it is called. NCCL does as much where it is asked to (`ordered`).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import re
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fzero.comm.agreement import Call, RollCall
from fzero.comm.ledger import Ledger, sent_elements
from fzero.core.device import kind_of
from fzero.core.tree_sum import tree_sum

# Up to here, for all ranks together, a psum by messages sends its whole input to everyone: one round of messages. Beyond, it sends
# pieces, and then their sums (measured on 2 cores: 4 ranks take 6.8 and 8.6 ms for 1 MB, 160 and 40 ms for 12 MB).
SMALL_BYTES = 4 << 20
# Newer torch has these names, and warns of the older ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective that was started; `wait()` finishes it and returns its result, once."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish: Callable[[], Tensor] | None = finish

    def wait(self) -> Tensor:
        """The result. Raises RankError where another rank is gone or late."""
        assert self._finish is not None, "a collective was waited for twice"
        finish, self._finish = self._finish, None
        return finish()


def done(x: Tensor) -> Pending:
    """A Pending whose result is there: `x`."""
    return Pending(lambda: x)


_LINKS: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def communicator_of(number: int) -> Communicator:
    """The link of this number, which is how operators in a traced graph name it; raises ValueError where it is gone."""
    link = _LINKS.get(number)
    if link is None:
        raise ValueError("a traced collective runs on a mesh that is gone; keep the mesh while its functions are used")
    return link


class Communicator:
    """The connection of this process with the other ranks of one mesh axis.

    ranks: the global ranks along the axis; this process is at place `rank`. transport: "gloo", "nccl" or "fake". ordered: whether sums
    over ranks follow `tree_sum` on NCCL too.
    """

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        rank: int,
        *,
        transport: str,
        ledger: Ledger,
        roll: RollCall,
        group: dist.ProcessGroup | None = None,
        ordered: bool = False,
    ) -> None:
        self.axis, self.ranks, self.rank, self.size = axis, tuple(ranks), rank, len(ranks)
        self.transport, self.ledger, self.roll, self.group = transport, ledger, roll, group
        self.ordered = ordered
        # From the next rank on, so that not all send to the same one first.
        self.others = [(rank + k) % self.size for k in range(1, self.size)]
        if transport == "fake":
            self.others = self.others[:1]  # nothing is sent: one stands for all of them, and holds the memory that they would
        self.number = next(_NUMBERS)
        _LINKS[self.number] = self

    def __repr__(self) -> str:
        return f"Link({self.axis}: rank {self.rank} of {self.size}, {self.transport})"

    # ---- collectives: started here, finished by Pending.wait --------------------------------------------------------

    def start_all_gather(self, x: Tensor, leaf: str = "", out: Tensor | None = None) -> Pending:
        """x [n, ...] -> [N n, ...] in rank order, in `out` where it is given (x may be this rank's slice of it)."""
        call = self._begin("all_gather", x, leaf, self.size * x.numel())
        x = x.contiguous()
        shape = (self.size * x.shape[0], *x.shape[1:])
        if out is None:
            out = x.new_empty(shape)
        elif out.shape != shape or out.dtype != x.dtype or not out.is_contiguous():
            raise ValueError(f"{call}: out is {out.dtype} {list(out.shape)}; it must be contiguous, {x.dtype} {list(shape)}")
        if self.transport == "nccl":
            return self._native(call, x, lambda: _all_gather(out, x, group=self.group, async_op=True), out)
        parts = out.view(self.size, *x.shape)
        finish = self._exchange(call, {j: x for j in self.others}, {j: parts[j] for j in self.others})
        if self.transport == "fake" or parts[self.rank].data_ptr() != x.data_ptr():
            parts[self.rank].copy_(x)
        return _then(finish, lambda: out)

    def start_psum_scatter(self, x: Tensor, leaf: str = "") -> Pending:
        """x [N n, ...] -> [n, ...]: this rank's piece of the sum over ranks."""
        call = self._begin("psum_scatter", x, leaf, x.numel())
        x = x.contiguous()
        pieces = x.view(self.size, x.shape[0] // self.size, *x.shape[1:])
        if self._by_messages(x):
            return self._sum_of(call, pieces)
        out = torch.empty_like(pieces[0])
        return self._native(call, x, lambda: _reduce_scatter(out, x, group=self.group, async_op=True), out)

    def start_psum(self, x: Tensor, leaf: str = "", guarded: bool = True) -> Pending:
        """x -> the sum over ranks, of the same shape. guarded: in checked mode, an x that is the same on all ranks is refused."""
        call = self._begin("psum", x, leaf, x.numel())
        if self.roll.checking and guarded:
            self._refuse_same(call, x)
        if not self._by_messages(x):
            out = x.clone(memory_format=torch.contiguous_format)
            return self._native(call, x, lambda: dist.all_reduce(out, group=self.group, async_op=True), out)
        x = x.contiguous()
        if self.size * x.numel() * x.element_size() <= SMALL_BYTES:
            return self._sum_of(call, [x] * self.size)
        # Messages need no padding: pieces may differ by one element.
        pending = self._sum_of(call, x.view(-1).tensor_split(self.size))

        def gather() -> Tensor:
            own, out = pending.wait(), torch.empty_like(x)
            parts = out.view(-1).tensor_split(self.size)
            finish = self._exchange(call, {j: own for j in self.others}, {j: parts[j] for j in self.others}, half=1)
            parts[self.rank].copy_(own)
            finish()
            return out

        return Pending(gather)

    def start_all_to_all(self, x: Tensor, leaf: str = "") -> Pending:
        """x [N n, ...] -> [N n, ...]: piece j goes to rank j, and piece j of the result comes from it."""
        call = self._begin("all_to_all", x, leaf, x.numel())
        x = x.contiguous()
        out = torch.empty_like(x)
        here, there = (t.view(self.size, x.shape[0] // self.size, *x.shape[1:]) for t in (x, out))
        finish = self._exchange(call, {j: here[j] for j in self.others}, {j: there[j] for j in self.others})
        there[self.rank].copy_(here[self.rank])
        return _then(finish, lambda: out)

    def start_ppermute(self, x: Tensor, perm: Sequence[tuple[int, int]], leaf: str = "") -> Pending:
        """x -> the x of the rank that sends to this one by the pairs (source, destination) of `perm`; zeros where none does."""
        call = self._begin("ppermute", x, leaf, x.numel() if self.sends(perm) else 0)
        x = x.contiguous()
        source = next((s for s, d in perm if d == self.rank), None)
        if source == self.rank:
            return done(x.clone())
        out = torch.zeros_like(x) if source is None else torch.empty_like(x)
        targets = [d for s, d in perm if s == self.rank]
        return _then(self._exchange(call, {d: x for d in targets}, {} if source is None else {source: out}), lambda: out)

    def sends(self, perm: Sequence[tuple[int, int]]) -> bool:
        """Whether this rank sends to another one in `perm`."""
        return any(s == self.rank and d != s for s, d in perm)

    # ---- what they have in common -----------------------------------------------------------------------------------

    def _begin(self, collective: str, x: Tensor, leaf: str, elements: int) -> Call:
        """Enter the collective in the ledger and, in checked mode, make sure that the others are at the same one."""
        if self.transport == "fake" and not (isinstance(x, FakeTensor) or x.is_meta):
            raise ValueError(f"{collective} over {self.axis}: a mesh for planning has fake tensors only; this one is real, {list(x.shape)}")
        self.roll.number += 1
        phase = self.ledger.phase_name
        dtype = str(x.dtype).removeprefix("torch.")
        call = Call(collective, self.axis, self.size, leaf, phase, dtype, list(x.shape), self.roll.number)
        self.roll.last = call
        if self.roll.checking:
            self.roll.compare(call, self.ranks[self.rank - 1])
        sent = sent_elements(collective, elements, self.size)
        self.ledger.add(collective, self.axis, leaf, x.dtype, sent)
        for watch in self.ledger.watches:
            watch.start(call.number, collective, self.axis, leaf, sent * x.dtype.itemsize)
        return call

    @contextlib.contextmanager
    def _waiting(self, call: Call) -> Iterator[None]:
        """The program waits for a collective: who watches is told, and an error will say so."""
        self.roll.waiting = call
        for watch in self.ledger.watches:
            watch.wait(call.number)
        yield
        self.roll.waiting = None
        for watch in self.ledger.watches:
            watch.done(call.number)

    def _refuse_same(self, call: Call, x: Tensor) -> None:
        """Raise ValueError, on all ranks, where `x` is the same on all of them bit for bit: a sum would multiply it by their number."""
        if not x.is_floating_point() or x.numel() < 2:
            return
        digest = 0
        if x.any():
            data = x.detach().contiguous().flatten().view(torch.uint8).cpu().numpy()
            digest = int.from_bytes(hashlib.blake2b(data, digest_size=7).digest())
        mine = torch.tensor([digest], device=x.device)
        all_of_them = [mine if j == self.rank else torch.empty_like(mine) for j in range(self.size)]
        self._exchange(call, {j: mine for j in self.others}, {j: all_of_them[j] for j in self.others}, half=2)()
        digests = {int(d) for d in all_of_them}
        if len(digests) == 1 and digests != {0}:
            raise ValueError(
                f"{call}: its input, {call.dtype} {call.shape}, is the same on all {self.size} ranks already, so the sum is {self.size} "
                f"times it; drop the psum, or divide the work (or the cotangent) between the ranks"
            )

    def _by_messages(self, x: Tensor) -> bool:
        """Whether sums over ranks follow `tree_sum`, by messages: not where NCCL sums, or would in a plan for GPUs, unless asked to."""
        return self.ordered or not (self.transport == "nccl" or (self.transport == "fake" and kind_of(x) == "cuda"))

    def _sum_of(self, call: Call, pieces: Sequence[Tensor]) -> Pending:
        """The sum over ranks of piece number `rank`; piece j goes to rank j."""
        own = pieces[self.rank]
        parts = [own if j == self.rank else torch.empty_like(own) for j in range(self.size)]
        finish = self._exchange(call, {j: pieces[j] for j in self.others}, {j: parts[j] for j in self.others})
        return _then(finish, lambda: tree_sum(parts, [j != self.rank for j in range(self.size)]))

    def _exchange(self, call: Call, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], half: int = 0) -> Callable[[], None]:
        """Start messages to and from places on the axis; the function returned waits for them, and keeps the buffers until then."""
        if self.transport == "fake":
            buffers = [*sends.values(), *receives.values()]

            def arrive() -> None:
                with self._waiting(call):
                    buffers.clear()  # they are held as long as on gloo

            return arrive
        # A message of another collective is never taken for one of this: its tag differs. half: which messages of the collective.
        said = f"{call.number} {call.collective} {call.leaf} {call.dtype} {call.shape} {half}"
        tag = zlib.crc32(said.encode()) & 0x3FFFFFFF
        # Receives first: what arrives then goes straight to its place.
        messages = [(dist.irecv, t, j) for j, t in receives.items() if t.numel()]
        messages += [(dist.isend, t, j) for j, t in sends.items() if t.numel()]
        if self.transport == "nccl":
            ops = [dist.P2POp(op, t, group=self.group, group_peer=j) for op, t, j in messages]
            work = [(w, self.rank) for w in (dist.batch_isend_irecv(ops) if ops else ())]
        else:
            work = []
            for op, t, j in messages:
                peer = {"group_src" if op is dist.irecv else "group_dst": j}
                try:
                    work.append((op(t, group=self.group, tag=tag, **peer), j))
                except RuntimeError as error:
                    raise self._lost(call, j, error) from None

        def finish() -> None:
            with self._waiting(call):
                while work:
                    started, j = work.pop(0)
                    try:
                        started.wait(*([] if self.transport == "nccl" else [datetime.timedelta(seconds=self.roll.timeout_s)]))
                    except RuntimeError as error:
                        raise self._lost(call, j, error) from None
            messages.clear()

        return finish

    def _native(self, call: Call, x: Tensor, start: Callable[[], dist.Work], out: Tensor) -> Pending:
        """A collective of NCCL's own of `x`, whose result is in `out`."""
        if self.transport == "fake":
            return _then(self._exchange(call, {0: x}, {0: out}), lambda: out)
        work = start()

        def finish() -> None:
            with self._waiting(call):
                try:
                    work.wait()
                except RuntimeError as error:
                    raise self._lost(call, self.rank, error) from None

        return _then(finish, lambda: out)

    def _lost(self, call: Call, place: int, error: RuntimeError) -> Exception:
        """The error of this rank where a message from or to `place` failed."""
        peer, text = f"rank {self.ranks[place]}", re.sub(r"^\[\S+\] ", "", str(error).splitlines()[0])
        if re.search("closed by peer|reset by peer|broken pipe|refused|endpoint is not connected", text, re.IGNORECASE):
            what = f"{peer} is gone (connection closed)"
        elif "Timed out" in text:
            what = f"{peer} did not answer within {self.roll.timeout_s:g} s: it is late, or runs another program (mesh.checked() tells)"
        else:
            what = text if self.transport == "nccl" else f"{peer}: {text}"
        return self.roll.error(call, what)


def _then(finish: Callable[[], None], result: Callable[[], Tensor]) -> Pending:
    def both() -> Tensor:
        finish()
        return result()

    return Pending(both)

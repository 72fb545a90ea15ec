"""Communicator: sends plain tensors between the ranks of one mesh axis, below autograd and torch.func.

Transports: comm/messages.py. Differentiable collectives: comm/collectives.py.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import weakref
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.comm.ledger import Ledger, sent_elements
from fzero.comm.messages import AxisMessages, CollectiveCall, ProgramAgreement
from fzero.core.autodiff import active_varying
from fzero.core.device import kind_of
from fzero.core.gpu_copies import Future, ready
from fzero.core.precision import tree_sum
from fzero.core.torch_private import FakeTensor

# If the inputs of all ranks together are at most this large, a psum by messages sends the whole input to every rank, in
# one round. Larger ones take two rounds, pieces and then their sums (one or two rounds, 4 ranks on 2 cores: 6.8 or 8.6
# ms for 1 MB, 160 or 40 ms for 12 MB).
SMALL_BYTES = 4 << 20
# Newer versions of torch have these names, and warn about the older ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
T = TypeVar("T")
ONE_SIDED = ("gather_to", "scatter_from", "exchange_rows")  # whose ranks send unlike amounts


_COMMUNICATORS: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def communicator_of(number: int) -> Communicator:
    """The communicator with this number, which traced graphs name; raises ValueError if it no longer exists."""
    communicator = _COMMUNICATORS.get(number)
    if communicator is None:
        raise ValueError("a traced collective runs on a mesh that is gone; keep the mesh while its functions are used")
    return communicator


def may_differ(x: Tensor, axis: str) -> bool:
    """Whether x is known to be a value that may differ between the ranks of an axis."""
    followed = active_varying()
    return followed is not None and followed.may_differ(x, axis)


def cut_counts(table: list[list[int]], sends: int, receives: int) -> list[list[int]]:
    """Cut the last counts [sender, receiver], so that no rank sends or receives more rows than this.

    >>> cut_counts([[3, 3], [4, 0]], 6, 5)
    [[3, 3], [2, 0]]
    """
    columns = [_cut(column, receives) for column in zip(*table)]
    return [_cut(row, sends) for row in zip(*columns)]


def _cut(counts: Sequence[int], limit: int) -> list[int]:
    """The counts, of which the last ones are less, so that they are at most `limit` together."""
    ends = [min(end, limit) for end in itertools.accumulate(counts)]
    return [end - begin for begin, end in zip([0, *ends], ends)]


class Communicator(AxisMessages):
    """The connection of this process with the other ranks of one mesh axis."""

    OPAQUE = True  # see core.program_cache.describe

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        *,
        transport: str,
        ledger: Ledger,
        agreement: ProgramAgreement,
        group: dist.ProcessGroup | None = None,
        ordered: bool = False,
    ) -> None:
        super().__init__(ranks, transport, group, agreement, ledger)
        self.axis, self.size, self.ordered = axis, len(ranks), ordered
        # Beginning with the next rank, so that not all ranks send to the same one first.
        self.peers = [(self.rank + k) % self.size for k in range(1, self.size)]
        if transport == "fake":
            # Nothing is sent: one other rank represents all, and its buffers the memory of a real collective.
            self.peers = self.peers[:1]
        # Calls so far: the same on all ranks at the same point of the axis's program. Ranks of pp run different
        # programs, so that of a whole process's calls each would count others.
        self.calls = 0
        # None: an exchange of more rows than a rank has room for raises; a list: it is cut, and their number appended.
        self.cut: list[int] | None = None
        self.number = next(_NUMBERS)
        _COMMUNICATORS[self.number] = self

    def __repr__(self) -> str:
        return f"Communicator({self.axis}: rank {self.rank} of {self.size}, {self.transport})"

    # ---- collectives: started here, finished by Future.wait ---------------------------------------------------------

    def start_all_gather(self, x: Tensor, leaf: str = "", out: Tensor | None = None) -> Future[Tensor]:
        """Start x [n, ...] -> [N n, ...] in rank order, into `out` if given (x may be this rank's slice of it)."""
        call = self._begin("all_gather", x, leaf, self.size * x.numel())
        x = x.contiguous()
        shape = (self.size * x.shape[0], *x.shape[1:])
        if out is None:
            out = x.new_empty(shape)
        elif out.shape != shape or out.dtype != x.dtype or not out.is_contiguous():
            raise ValueError(
                f"{call}: out is {out.dtype} {list(out.shape)}; it must be contiguous, {x.dtype} {list(shape)}"
            )
        if self.transport_of(x) == "nccl":
            return self.native(call, x, lambda: _all_gather(out, x, group=self.group, async_op=True), out)
        parts = out.view(self.size, *x.shape)
        gathering = self.exchange(call, {j: x for j in self.peers}, {j: parts[j] for j in self.peers}, lambda: out)
        # After the start, so that the copy overlaps with the messages.
        if self.transport == "fake" or parts[self.rank].data_ptr() != x.data_ptr():
            parts[self.rank].copy_(x)
        return gathering

    def start_psum_scatter(self, x: Tensor, leaf: str = "") -> Future[Tensor]:
        """Start x [N n, ...] -> [n, ...]: this rank's piece of the sum over ranks."""
        call = self._begin("psum_scatter", x, leaf, x.numel())
        x = x.contiguous()
        pieces = x.view(self.size, x.shape[0] // self.size, *x.shape[1:])
        if self._by_messages(x):
            return self._sum_of(call, pieces)
        out = torch.empty_like(pieces[0])
        return self.native(call, x, lambda: _reduce_scatter(out, x, group=self.group, async_op=True), out)

    def start_psum(self, x: Tensor, leaf: str = "", guarded: bool = True) -> Future[Tensor]:
        """Start x -> the sum over ranks; guarded: in checked mode, refuse an x that is the same on all ranks."""
        call = self._begin("psum", x, leaf, x.numel())
        if self.agreement.checking and guarded and not may_differ(x, self.axis):
            self._refuse_same(call, x)
        if not self._by_messages(x):
            out = x.clone(memory_format=torch.contiguous_format)
            return self.native(call, x, lambda: dist.all_reduce(out, group=self.group, async_op=True), out)
        x = x.contiguous()
        if self.size * x.numel() * x.element_size() <= SMALL_BYTES:
            return self._sum_of(call, [x] * self.size)
        # Point-to-point messages need no padding: the sizes of pieces may differ by one element.
        pending = self._sum_of(call, x.view(-1).tensor_split(self.size))

        def gather() -> Tensor:
            # half=1: the tag of the second round, which must not meet the messages of the first.
            local_sum, out = pending.wait(), torch.empty_like(x)
            parts = out.view(-1).tensor_split(self.size)
            return self._swap(call, [local_sum] * self.size, parts, out, half=1).wait()

        return Future(gather)

    def start_all_to_all(self, x: Tensor, leaf: str = "") -> Future[Tensor]:
        """Start x [N n, ...] -> [N n, ...]: piece j goes to rank j and comes from rank j."""
        call = self._begin("all_to_all", x, leaf, x.numel())
        x = x.contiguous()
        out = torch.empty_like(x)
        sent_slices, received_slices = (t.view(self.size, x.shape[0] // self.size, *x.shape[1:]) for t in (x, out))
        return self._swap(call, sent_slices, received_slices, out)

    def start_exchange_rows(
        self, x: Tensor, counts: Tensor, capacity: int, leaf: str = "", otherwise: str = ""
    ) -> Future[Tensor]:
        """Start x [M, ...] -> [capacity, ...]: counts[r, j] rows from rank r to rank j, then zeros."""
        out, row = x.new_empty((capacity, *x.shape[1:])), math.prod(x.shape[1:])
        if self.transport == "fake":  # as many rows to each rank
            rows = min(x.shape[0], capacity) * (self.size - 1) // self.size
            call = self._begin("exchange_rows", x, leaf, rows * row)
            return self.exchange(call, {j: x for j in self.peers}, {j: out for j in self.peers}, lambda: out)
        table = counts.tolist()
        # All ranks have the same table, so that all cut or raise alike, before anything is sent.
        if self.cut is not None and (max_rows := max(map(sum, zip(*table)))) > capacity:
            self.cut.append(max_rows)
        if self.cut:
            table = cut_counts(table, x.shape[0], capacity)
        sent, arrived = table[self.rank], [row[self.rank] for row in table]
        totals = [sum(row[j] for row in table) for j in range(self.size)]
        if max(map(sum, table)) > x.shape[0]:
            raise ValueError(
                f"exchange_rows over {self.axis} of {leaf}: the counts {table} are of more rows than the {x.shape[0]} "
                "that a rank has"
            )
        if max(totals) > capacity:
            j = totals.index(max(totals))
            raise ValueError(
                f"exchange_rows over {self.axis} of {leaf}: rank {self.ranks[j]} is sent {totals[j]} rows, "
                f"{totals[j] / max(1, x.shape[0]):.2f} times what each rank sends, and has room for {capacity}; "
                f"{otherwise}"
            )
        call = self._begin("exchange_rows", x, leaf, (sum(sent) - sent[self.rank]) * row)
        pieces = x.contiguous().split([*sent, x.shape[0] - sum(sent)])
        slots = out.split([*arrived, capacity - sum(arrived)])
        slots[-1].zero_()
        return self._swap(call, pieces, slots, out)

    def start_ppermute(self, x: Tensor, perm: Sequence[tuple[int, int]], leaf: str = "") -> Future[Tensor]:
        """Start x -> the x of the rank that sends to this one by the pairs of `perm`; zeros if none does."""
        sends = any(s == self.rank and d != s for s, d in perm)
        call = self._begin("ppermute", x, leaf, x.numel() if sends else 0)
        x = x.contiguous()
        source = next((s for s, d in perm if d == self.rank), None)
        if source == self.rank:
            return ready(x.clone())
        out = torch.zeros_like(x) if source is None else torch.empty_like(x)
        targets = [d for s, d in perm if s == self.rank]
        receives = {} if source is None else {source: out}
        return self.exchange(call, {d: x for d in targets}, receives, lambda: out)

    def start_message(self, x: Tensor, peer: int, label: str, *, sends: bool) -> Future[Tensor]:
        """Start to send x to rank `peer` of the axis, or to receive it; both give one label."""
        self.agreement.number += 1
        phase, dtype = self.ledger.phase_name, str(x.dtype).removeprefix("torch.")
        order = self.agreement.number
        call = CollectiveCall("message", self.axis, self.size, label, phase, dtype, list(x.shape), 0, order)
        self.agreement.last = call
        sent = x.numel() if sends else 0
        if sends:
            self.ledger.add("message", self.axis, label.split()[0], x.dtype, sent)
        for watch in self.ledger.watches:
            watch.start(order, "message", self.axis, label, sent * x.dtype.itemsize)
        # Through the communicator of the channel, whose stream carries nothing else.
        if self.transport_of(x) == "nccl" and x.numel():
            connection = self.connections[label.split()[0]]
            return self.native(call, x, lambda: connection.start(x, sends=sends), x)
        return self.exchange(call, {peer: x} if sends else {}, {} if sends else {peer: x}, lambda: x)

    def start_gather_to(self, x: Tensor, targets: Sequence[int], leaf: str = "") -> Future[Tensor | None]:
        """Start x [n, ...] -> [N n, ...] in rank order on the ranks `targets`, None on others."""
        call = self._begin("gather_to", x, leaf, x.numel() * len([j for j in targets if j != self.rank]))
        x, out = x.contiguous(), None
        receives: dict[int, Tensor] = {}
        if self.rank in targets:
            out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
            parts = out.view(self.size, *x.shape)
            parts[self.rank].copy_(x)
            receives = {j: parts[j] for j in self.peers}
        return self.exchange(call, {j: x for j in self.peers if j in targets}, receives, lambda: out)

    def start_scatter_from(
        self, x: Tensor | None, source: int, out: Tensor, leaf: str = "", *, cut: bool = True
    ) -> Future[Tensor]:
        """Start to write this rank's part of `x`, which rank `source` has, into `out`; cut=False: all of x."""
        call = self._begin("scatter_from", out, leaf, out.numel() * (self.size - 1) * (self.rank == source))
        if self.rank != source:
            return self.exchange(call, {}, {source: out}, lambda: out)
        assert x is not None  # the source has it
        pieces = x.contiguous().view(self.size, *out.shape) if cut else x.contiguous().expand(self.size, *out.shape)
        sending = self.exchange(call, {j: pieces[j] for j in self.peers}, {}, lambda: out)
        out.copy_(pieces[self.rank])
        return sending

    # ---- shared by the collectives -----------------------------------------------------------------------------------

    def _begin(self, collective: str, x: Tensor, leaf: str, elements: int) -> CollectiveCall:
        """Enter the collective in the ledger; in checked mode first verify that the other ranks are at it."""
        if self.transport == "fake" and not (isinstance(x, FakeTensor) or x.is_meta):
            raise ValueError(
                f"{collective} over {self.axis}: a mesh for planning has fake tensors only; this one is real, "
                f"{list(x.shape)}"
            )
        self.agreement.number += 1
        self.calls += 1
        phase = self.ledger.phase_name
        dtype = str(x.dtype).removeprefix("torch.")
        order = self.agreement.number
        call = CollectiveCall(collective, self.axis, self.size, leaf, phase, dtype, list(x.shape), self.calls, order)
        self.agreement.last = call
        if self.agreement.checking:
            self.agreement.compare(call, self.ranks[self.rank - 1])
        sent = elements if collective in ONE_SIDED else sent_elements(collective, elements, self.size)
        if sent or collective not in ONE_SIDED:
            self.ledger.add(collective, self.axis, leaf, x.dtype, sent)
        for watch in self.ledger.watches:
            watch.start(call.order, collective, self.axis, leaf, sent * x.dtype.itemsize)
        return call

    def _refuse_same(self, call: CollectiveCall, x: Tensor) -> None:
        """Raise ValueError on all ranks if `x` has the same bits on all of them: the sum would only multiply it."""
        if not x.is_floating_point() or x.numel() < 2:
            return
        digest = 0
        if x.any():
            data = x.detach().contiguous().flatten().view(torch.uint8).cpu().numpy()
            # 7 bytes, as the digest must fit in an int64 of positive sign.
            digest = int.from_bytes(hashlib.blake2b(data, digest_size=7).digest())
        local_digest = torch.tensor([digest], device=x.device)
        rank_digests = [local_digest if j == self.rank else torch.empty_like(local_digest) for j in range(self.size)]
        receives = {j: rank_digests[j] for j in self.peers}
        self.exchange(call, {j: local_digest for j in self.peers}, receives, lambda: None, half=2).wait()
        digests = {int(d) for d in rank_digests}
        # 0: all zeros, whose sum is right whoever adds it.
        if len(digests) == 1 and digests != {0} and self.agreement.noted is not None:
            self.agreement.noted.append(call)
        elif len(digests) == 1 and digests != {0}:
            raise ValueError(
                f"{call}: its input, {call.dtype} {call.shape}, is the same on all {self.size} ranks already, "
                f"so the sum is {self.size} "
                f"times it; drop the psum, or divide the work (or the cotangent) between the ranks"
            )

    def _by_messages(self, x: Tensor) -> bool:
        """Whether sums over ranks use messages and `tree_sum`: on gloo always, on NCCL if `ordered`."""
        # gloo's own collectives copy a lot and its reductions are slow (4 ranks on 2 cores, 12 MB:
        # reduce_scatter_tensor 60 ms; messages and one local sum 14 ms). So on gloo each rank sends every piece
        # directly to the rank that needs it, which adds the pieces by `tree_sum`: a sum then has the same bits
        # whichever collective computes it.
        return self.ordered or not (
            self.transport_of(x) == "nccl" or (self.transport == "fake" and kind_of(x) == "cuda")
        )

    def _swap(
        self,
        call: CollectiveCall,
        pieces: Sequence[Tensor] | Tensor,
        slots: Sequence[Tensor] | Tensor,
        out: T,
        half: int = 0,
    ) -> Future[T]:
        """Start to send piece j to rank j and to receive slot j of the result `out` from it."""
        sends, receives = {j: pieces[j] for j in self.peers}, {j: slots[j] for j in self.peers}
        arriving = self.exchange(call, sends, receives, lambda: out, half)
        slots[self.rank].copy_(pieces[self.rank])
        return arriving

    def _sum_of(self, call: CollectiveCall, pieces: Sequence[Tensor] | Tensor) -> Future[Tensor]:
        """Start sending piece j to rank j, and summing this rank's piece over ranks."""
        local_piece = pieces[self.rank]
        parts = [local_piece if j == self.rank else torch.empty_like(local_piece) for j in range(self.size)]
        sends, receives = {j: pieces[j] for j in self.peers}, {j: parts[j] for j in self.peers}
        owned = [j != self.rank for j in range(self.size)]
        return self.exchange(call, sends, receives, lambda: tree_sum(parts, owned))


class Axis(NamedTuple):
    """One axis of a mesh as this process sees it: its name, its number of ranks, and this process's number among them.

    >>> axis = fzero.fake_mesh({"dp": 4, "tp": 2}, rank=7)["dp"]
    >>> axis.size, axis.rank
    (4, 3)
    """

    name: str
    size: int = 1
    rank: int = 0
    communicator: Communicator | None = None  # None if size is 1

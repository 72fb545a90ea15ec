"""Copies of many tensors between the host and a GPU: small ones side by side, in buckets; a large one in pieces.

A copy takes some 10 us to start, so tensors that are copied faster than that go together. fzero.core.gpu_copies makes
each copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.core.gpu import HOST
from fzero.core.gpu_copies import Copied, Future, copy_in, copy_in_split, copy_out, free_copied

PIECE_BYTES = 16 << 20  # of pinned memory, on the way to a GPU
# Bytes below which a copy takes no longer than its start, some 10 us, over a link of 64 GB/s; and those from which on
# it reaches the link's rate, also one of 450 GB/s.
SMALL_COPY, LARGE_COPY = 512 << 10, 64 << 20


def bring(x: Tensor, device: torch.device) -> Tensor:
    """`x` on `device`; from unpinned memory through two small pinned pieces in turn."""
    if device.type != "cuda" or x.is_cuda or x.is_pinned():
        return x.to(device)
    out = torch.empty(x.shape, dtype=x.dtype, device=device)
    size, waiting = max(1, PIECE_BYTES // x.element_size()), []
    for source, target in zip(x.contiguous().view(-1).split(size), out.view(-1).split(size)):
        if len(waiting) < 2:
            piece = torch.empty(source.shape, dtype=x.dtype, device=HOST, pin_memory=True)
        else:
            piece, copied = waiting.pop(0)
            copied.finish()
            piece = piece[: source.numel()]
        waiting.append((piece, copy_in(piece.copy_(source), device, out=target)))
    for _, copied in waiting:
        copied.finish()
    return out


def bring_together(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Small tensors of the host on `device`, by one copy for each dtype, for which the host does not wait.

    >>> bring_together([torch.arange(2), torch.ones(1)], "cpu")
    [tensor([0, 1]), tensor([1.])]
    """
    device = torch.device(device)
    if device.type != "cuda":
        return [x.to(device) for x in tensors]
    out: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        chosen = [i for i, x in enumerate(tensors) if x.dtype == dtype]
        sizes = [tensors[i].numel() for i in chosen]
        # Of PyTorch's allocator, which gives it to nobody before the copy is made.
        pinned = torch.empty(sum(sizes), dtype=dtype, pin_memory=True)
        for part, i in zip(pinned.split(sizes), chosen):
            part.copy_(tensors[i].reshape(-1))
        parts = pinned.to(device, non_blocking=True).split(sizes)
        out |= {i: part.view(tensors[i].shape) for i, part in zip(chosen, parts)}
    return [out[i] for i in range(len(tensors))]


def _empty_pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=HOST, pin_memory=True)


def allocate_adjacent(
    like: Sequence[Tensor], layers: int | None = None, empty: Callable[..., Tensor] = _empty_pinned
) -> list[Tensor]:
    """Uninitialised memory of the host for each tensor; one dtype side by side, layer by layer."""
    # empty: (shape, dtype=) -> such memory; that of PyTorch's allocator serves what comes and goes.
    # Side by side, so that one copy fills a layer of all of them.
    out: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in like):
        chosen = [i for i, x in enumerate(like) if x.dtype == dtype]
        sizes, lead = [like[i].numel() for i in chosen], () if layers is None else (layers,)
        buffer = empty((*lead, sum(sizes)), dtype=dtype)
        out |= {i: chunk.view((*lead, *like[i].shape)) for i, chunk in zip(chosen, buffer.split(sizes, -1))}
    return [out[i] for i in range(len(like))]


def copy_out_buckets(tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Copied]:
    """`copy_out` of each tensor to its memory in `outs`, with one event; neighbours together, by 64 MB at most."""
    last = None
    for bucket in _adjacent(outs) if tensors and tensors[0].is_cuda else [[i] for i in range(len(outs))]:
        first = bucket[0]
        if len(bucket) == 1:
            last = copy_out(tensors[first], out=outs[first])
        else:
            packed = torch.cat([tensors[i].reshape(-1) for i in bucket])
            last = copy_out(packed, out=_row(outs[first], packed.numel()))
    # They are on one stream, so when the last one is made the others are too.
    return [Copied(out, None if last is None else last.event) for out in outs]


def copy_in_buckets(
    tensors: Sequence[Tensor],
    device: torch.device,
    *,
    events: Sequence[Any] | None = None,
    outs: Sequence[Tensor] | None = None,
) -> list[Copied]:
    """`copy_in` of each tensor, after its event if any; neighbours together, by 64 MB at most."""
    out: dict[int, Copied] = {}
    for bucket in _adjacent(tensors) if device.type == "cuda" else [[i] for i in range(len(tensors))]:
        first, bucket_events = bucket[0], [] if events is None else [events[i] for i in bucket]
        if len(bucket) == 1:
            event, buffer = bucket_events[0] if bucket_events else None, None if outs is None else outs[first]
            out[first] = copy_in(tensors[first], device, event=event, out=buffer)
        else:
            row = _row(tensors[first], sum(tensors[i].numel() for i in bucket))
            shapes = [tensors[i].shape for i in bucket]
            buffers = None if outs is None else [outs[i] for i in bucket]
            out |= zip(bucket, copy_in_split(row, device, shapes, events=bucket_events, outs=buffers))
    return [out[i] for i in range(len(tensors))]


def _row(first: Tensor, size: int) -> Tensor:
    """The `size` numbers of a memory from those of `first` on."""
    return first.as_strided((size,), (1,))


def _adjacent(buffers: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of host tensors in buckets: one, or small neighbours in memory."""
    buckets: list[list[int]] = []
    bucket_bytes, end = 0, None  # the bytes of the last bucket, and where its memory ends
    for i in sorted(
        range(len(buffers)), key=lambda i: (buffers[i].untyped_storage()._cdata, buffers[i].storage_offset())
    ):
        buffer, size = buffers[i], buffers[i].nbytes
        small, location = size < SMALL_COPY and buffer.is_contiguous(), (buffer.untyped_storage()._cdata, buffer.dtype)
        if small and end == (*location, buffer.storage_offset()) and bucket_bytes + size <= LARGE_COPY:
            buckets[-1].append(i)
        else:
            buckets.append([i])
            bucket_bytes = 0
        bucket_bytes = bucket_bytes + size
        end = (*location, buffer.storage_offset() + buffer.numel()) if small else None
    return buckets


def start_fetch(tensors: Sequence[Tensor]) -> Future[list[Tensor]]:
    """Start to copy tensors to the host's memory, small ones together, with one wait for all."""
    leaving = [x for x in tensors if x.is_cuda]
    small = [x for x in leaving if x.nbytes < SMALL_COPY]
    buffers = iter(allocate_adjacent(small))
    outs = [next(buffers) if x.nbytes < SMALL_COPY else allocate_adjacent([x])[0] for x in leaving]
    started = copy_out_buckets(leaving, outs)
    on_host = [None if x.is_cuda else x.to(HOST) for x in tensors]
    device = leaving[0].device if leaving else HOST

    def fetched() -> list[Tensor]:
        if started:
            started[-1].finish()
            free_copied(device)
        copies = iter(started)
        return [next(copies).tensor if x is None else x for x in on_host]

    return Future(fetched)


def read_scalars(scalars: Sequence[Tensor]) -> list[Any]:
    """The values of 0-dim tensors of one dtype; those of a GPU by one copy and wait.

    >>> read_scalars([torch.tensor(3), torch.tensor(4)])
    [3, 4]
    """
    groups: dict[torch.device, list[int]] = {}
    for i, x in enumerate(scalars):
        groups.setdefault(x.device, []).append(i)
    values = {}
    for indices in groups.values():
        stacked = torch.stack([scalars[i] for i in indices])
        values.update(zip(indices, copy_out(stacked).finish().tolist()))
    return [values[i] for i in range(len(scalars))]

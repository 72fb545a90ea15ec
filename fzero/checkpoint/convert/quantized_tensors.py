"""Weights of folders of `transformers` in codes, dequantised on request: GPTQ, AWQ, compressed-tensors and FP8.

    w[o, i] = (q[o, i] - z[r, c]) s[r, c]      of output o and input i, in the block (r, c) of a scale

in float32, rounded once to the dtype asked for. Of codes in a stream of b bits in words of int32, code n is bits b n to
b n + b - 1, the lowest first. O outputs, I inputs, G groups of inputs; g[i] = i / group unless a tensor says it.

GPTQ    qweight int32 [I b / 32, O] of q along I; scales [G, O]; qzeros int32 [G, O b / 32] along O, of z - 1 modulo
        2^b, or of z with checkpoint_format gptq_v2; g_idx int32 [I]
AWQ     qweight int32 [I, O / 8] of q along O, scales [G, O], qzeros int32 [G, O / 8] of z; of the eight outputs of a
        word it has number 0 first, then 2, 4, 6, 1, 3, 5 and 7
packed  weight_packed int32 [O, I b / 32] of q + 2^(b-1) along I; weight_scale [O, G]; weight_shape [2]: O, I;
        weight_zero_point int32 [O b / 32, G] of z + 2^(b-1) along O, or int8 [O, G]; weight_g_idx int32 [I]
plain   weight int8 or float8 [O, I]; weight_scale [O, 1], [1], [O, G] or by blocks; weight_zero_point int8
float8  NAME float8_e4m3fn [O, I] or, of experts, [E, O, I]; NAME_scale_inv by blocks, [E, r, c] or one, in e8m0 or
        uint8 2^(n - 127)

packed and plain are of compressed-tensors, plain of FBGEMM too, float8 of DeepSeek-V3 and what followed it.

Memory: while a weight is read, its tensors as stored, and the values.

Ref: Frantar et al. 2023, "GPTQ", arXiv:2210.17323; Lin et al. 2024, "AWQ", arXiv:2306.00978.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint.convert.quantization_config import FLOAT8, MXFP4, Quantization
from fzero.checkpoint.convert.tensor_files import TensorEntry, unpack_tensors

# By layout, the tensors that a weight has, the scales second, and those that it may have.
TENSORS = {
    "gptq": (("qweight", "scales", "qzeros"), ("g_idx",)),
    "awq": (("qweight", "scales", "qzeros"), ()),
    "packed": (("weight_packed", "weight_scale", "weight_shape"), ("weight_zero_point", "weight_g_idx")),
    "plain": (("weight", "weight_scale"), ("weight_zero_point",)),
}
# Of activations that are quantised, which they are not here.
ACTIVATION_TENSORS = ("input_scale", "input_zero_point", "activation_scale")
ORDERS = ("g_idx", "weight_g_idx")  # the group of each input
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CHUNK = 1 << 18  # numbers at a time: in float32 they stay in a cache
ALIGNMENT = 32  # codes in a row begin and end with words, whatever their bits
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
POWERS = (torch.float8_e8m0fnu, torch.uint8)  # of scales that are powers of two
SCALE_SUFFIX = "_scale_inv"
PAIR = "gate_up_proj"  # a weight of experts that is two, each in blocks of its own


def unpack_codes(words: Tensor, bits: int, count: int, dim: int, order: Sequence[int] = ()) -> Tensor:
    """The first `count` codes, uint8, of the streams along `dim` of a matrix of int32 words.

    order: of the codes of a word, the number that each has among them.

    >>> unpack_codes(torch.tensor([[0x76543210]], dtype=torch.int32), 4, 8, 1)
    tensor([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.uint8)
    """
    period, step = _period(bits)
    shape = list(words.shape)
    shape[dim] = words.shape[dim] // step * period
    codes = torch.empty(shape, dtype=torch.uint8)
    target, streams = codes.movedim(dim, 0), words.movedim(dim, 0)
    for i in range(period):
        word, offset = divmod(i * bits, 32)
        code = streams[word::step] >> offset
        if offset + bits > 32:  # it ends in the next word
            code = code & ((1 << (32 - offset)) - 1) | streams[word + 1 :: step] << (32 - offset)
        target[order[i] if order else i :: period] = code & ((1 << bits) - 1)
    return codes.narrow(dim, 0, count)


def _period(bits: int) -> tuple[int, int]:
    """(codes, words) after which a code begins with a word again."""
    divisor = math.gcd(bits, 32)
    return 32 // divisor, bits // divisor


def _words(count: int, bits: int) -> int:
    period, step = _period(bits)
    return -(-count // period) * step


class Codes(NamedTuple):
    """A weight in codes, in memory."""

    shape: tuple[int, int]  # R, C
    unpack: Callable[[int, int], Tensor]  # the codes of rows from one that is a multiple of ALIGNMENT to another
    scales: Tensor  # a row and a column for each block
    zeros: Tensor  # as scales
    rows: Tensor  # [R], the row of the scale of each
    columns: Tensor | int  # [C], the column of it, or how many in a row share one; 0: all

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight [R, C]."""
        out = torch.empty(self.shape, dtype=dtype)
        step = max(ALIGNMENT, CHUNK // max(1, self.shape[1]) // ALIGNMENT * ALIGNMENT)
        for first in range(0, len(out), step):
            last = min(first + step, len(out))
            values = _floats(self.unpack(first, last)) - self._spread(self.zeros, first, last)
            out[first:last] = values * self._spread(self.scales, first, last)
        return out

    def _spread(self, table: Tensor, first: int, last: int) -> Tensor:
        """Of some rows, what a table has for each number, or each row."""
        rows = table[self.rows[first:last]].float()
        if isinstance(self.columns, Tensor):
            return rows.index_select(1, self.columns)
        return rows.repeat_interleave(self.columns, 1)[:, : self.shape[1]] if self.columns > 1 else rows


def _floats(codes: Tensor) -> Tensor:
    """The codes as numbers in float32."""
    if codes.dtype != torch.float8_e4m3fn:
        return codes.float()
    # By a table of all: torch converts them one by one, in four times the time.
    numbers = torch.arange(256, dtype=torch.uint8).view(codes.dtype).float()
    return numbers.index_select(0, codes.reshape(-1).view(torch.uint8).int()).view(codes.shape)


class PackedWeight(NamedTuple):
    """A weight in codes, in a folder."""

    shape: tuple[int, ...]  # [O, I] or [E, O, I]
    tensors: dict[str, tuple[Sequence[torch.dtype], tuple[int, ...]]]  # the dtypes and the shape that its tensors have
    read: Callable[[Mapping[str, Tensor]], Codes]
    transposed: bool = False  # whether the codes are [I, O]


def dequantized_tensors(
    source: Path, tensors: Mapping[str, TensorEntry], quantization: Quantization, dtype: torch.dtype | None
) -> dict[str, TensorEntry]:
    """The tensors with NAME.weight, dequantised on request, in place of the tensors of each weight in codes.

    dtype: of the weights; None takes the config.json's, else that of the scales.
    Raises ValueError naming a tensor that is missing, there twice, or of another dtype or shape."""
    if quantization.layout == MXFP4:
        return unpack_tensors(source, tensors)
    if quantization.layout == FLOAT8:
        return _float8_tensors(source, tensors, quantization, dtype)
    needed, extra = TENSORS[quantization.layout]
    kinds = (*needed, *extra)
    marks = {f".{kind}": len(kind) + 1 for kind in kinds if kind != "weight"}
    stems = {name[:-length] for name in tensors for mark, length in marks.items() if name.endswith(mark)}
    if not stems:
        raise ValueError(f"{source}: no weight is in codes, and quantization_config says {quantization.text}")
    used = {f"{stem}.{kind}" for stem in stems for kind in (*kinds, *ACTIVATION_TENSORS)}
    out = {name: entry for name, entry in tensors.items() if name not in used}
    for stem in sorted(stems):
        weight = f"{stem}.weight"
        if weight in out:
            raise ValueError(f"{source}: tensor {weight} is there twice, once in {quantization.text}")
        entries = {kind: tensors[f"{stem}.{kind}"] for kind in kinds if f"{stem}.{kind}" in tensors}
        order = [kind for kind in extra if kind in ORDERS and quantization.act_order]
        for kind in (*needed, *order):
            if kind not in entries:
                names = ", ".join((*needed, *order))
                raise ValueError(
                    f"{source}: tensor {stem}.{kind} is missing: in {quantization.text} a weight has {names}"
                )
        out[weight] = _entry(f"{source}: tensor {stem}", entries, quantization, dtype)
    return out


def _float8_tensors(
    source: Path, tensors: Mapping[str, TensorEntry], quantization: Quantization, dtype: torch.dtype | None
) -> dict[str, TensorEntry]:
    """As dequantized_tensors, of weights whose scales have their names and a suffix."""
    names = {name.removesuffix(SCALE_SUFFIX) for name in tensors if name.endswith(SCALE_SUFFIX)}
    names |= {name for name, entry in tensors.items() if entry.dtype == torch.float8_e4m3fn}
    if not names:
        raise ValueError(f"{source}: no weight is in codes, and quantization_config says {quantization.text}")
    used = {f"{name}{SCALE_SUFFIX}" for name in names}
    for kind in ACTIVATION_TENSORS:
        used |= {f"{name.removesuffix('weight')}{kind}" for name in names if name.endswith(".weight")}
        used |= {f"{name}_{kind}" for name in names if not name.endswith(".weight")}
    out = {name: entry for name, entry in tensors.items() if name not in used}
    for name in sorted(names):
        for actual in (name, name + SCALE_SUFFIX):
            if actual not in tensors:
                raise ValueError(
                    f"{source}: tensor {actual} is missing: in {quantization.text} a weight has NAME and "
                    f"NAME{SCALE_SUFFIX}"
                )
        stem, _, kind = name.rpartition(".")
        entries = {kind: tensors[name], kind + SCALE_SUFFIX: tensors[name + SCALE_SUFFIX]}
        out[name] = _entry(f"{source}: tensor {stem}", entries, quantization, dtype)
    return out


def is_zero_bias(name: str, entry: TensorEntry) -> bool:
    """Whether a tensor is a bias that changes nothing, as programs of GPTQ write of layers that have none."""
    return name.endswith(".bias") and len(entry.shape) == 1 and not entry.give().any()


def _entry(
    subject: str, entries: dict[str, TensorEntry], quantization: Quantization, dtype: torch.dtype | None
) -> TensorEntry:
    """The weight of these tensors, whose dtypes and shapes are checked."""
    first, scales = list(entries)[:2]  # as TENSORS has them
    ranks = (2, 3) if quantization.layout == FLOAT8 and first != "weight" else (2,)
    if len(entries[first].shape) not in ranks:
        raise ValueError(f"{subject}.{first} has shape {list(entries[first].shape)}; in {quantization.text} it has two")
    packed = LAYOUTS[quantization.layout](subject, entries, quantization)
    for kind, entry in entries.items():
        dtypes, shape = packed.tensors[kind]
        # One scale of all may be [1, 1], [1] or [].
        fits = tuple(entry.shape) == shape or math.prod(entry.shape) == math.prod(shape) == 1
        if entry.dtype not in dtypes or not fits:
            raise ValueError(
                f"{subject}.{kind} is {entry.dtype} {list(entry.shape)}; in {quantization.text} it must be "
                f"{' or '.join(map(str, dtypes))} {list(shape)}"
            )
    dtype = dtype or quantization.dtype or entries[scales].dtype
    if dtype in POWERS:
        raise ValueError(f"{subject}.{scales} is {dtype}, and config.json has no dtype; give one, or load_hf a dtype")

    def give() -> Tensor:
        values = packed.read({kind: entry.give() for kind, entry in entries.items()}).dequantize(dtype)
        return values.t() if packed.transposed else values.view(packed.shape)

    return TensorEntry(dtype, packed.shape, give)


def _numbers(count: int, size: int) -> Tensor:
    """[count], the block that each is in; size 0: one block."""
    return torch.arange(count) // (size or max(1, count))


def _blocks(count: int, size: int) -> int:
    return -(-count // size) if size else 1


def _groups(subject: str, tensors: Mapping[str, Tensor], inputs: int, quantization: Quantization) -> Tensor:
    """[I], the group of each input."""
    size = quantization.block[1]
    groups = _numbers(inputs, size)
    for kind in ORDERS:
        if kind in tensors:
            order = tensors[kind].long()
            if not quantization.act_order and not torch.equal(order, groups):
                raise ValueError(f"{subject}.{kind} is not in order, and by quantization_config it is")
            if inputs and not 0 <= int(order.min()) <= int(order.max()) < _blocks(inputs, size):
                raise ValueError(
                    f"{subject}.{kind} has groups {int(order.min())} to {int(order.max())}; there are "
                    f"{_blocks(inputs, size)}"
                )
            groups = order
    return groups


def _gptq_weight(subject: str, entries: Mapping[str, TensorEntry], quantization: Quantization) -> PackedWeight:
    bits, (words, outputs) = quantization.bits, entries["qweight"].shape
    inputs = math.prod(entries["g_idx"].shape) if "g_idx" in entries else words * 32 // bits
    groups = _blocks(inputs, quantization.block[1])

    def read(tensors: Mapping[str, Tensor]) -> Codes:
        zeros = unpack_codes(tensors["qzeros"], bits, outputs, 1).int() + quantization.zero_shift
        rows = _groups(subject, tensors, inputs, quantization)
        zeros = zeros & ((1 << bits) - 1)

        def unpack(first: int, last: int) -> Tensor:
            words = tensors["qweight"][first // ALIGNMENT * bits : _words(last, bits)]
            return unpack_codes(words, bits, last - first, 0)

        return Codes((inputs, outputs), unpack, tensors["scales"], zeros, rows, 1)

    specs = {
        "qweight": ((torch.int32,), (_words(inputs, bits), outputs)),
        "scales": (FLOATS, (groups, outputs)),
        "qzeros": ((torch.int32,), (groups, _words(outputs, bits))),
        "g_idx": ((torch.int32,), (inputs,)),
    }
    return PackedWeight((outputs, inputs), specs, read, transposed=True)


def _awq_weight(subject: str, entries: Mapping[str, TensorEntry], quantization: Quantization) -> PackedWeight:
    inputs, words = entries["qweight"].shape
    bits, outputs = quantization.bits, words * 32 // quantization.bits
    groups = _blocks(inputs, quantization.block[1])

    def read(tensors: Mapping[str, Tensor]) -> Codes:
        def unpack(first: int, last: int, kind: str = "qweight") -> Tensor:
            return unpack_codes(tensors[kind][first:last], bits, outputs, 1, AWQ_ORDER)

        rows = _groups(subject, tensors, inputs, quantization)
        return Codes((inputs, outputs), unpack, tensors["scales"], unpack(0, groups, "qzeros"), rows, 1)

    specs = {
        "qweight": ((torch.int32,), (inputs, words)),
        "scales": (FLOATS, (groups, outputs)),
        "qzeros": ((torch.int32,), (groups, words)),
    }
    return PackedWeight((outputs, inputs), specs, read, transposed=True)


def _compressed_weight(subject: str, entries: Mapping[str, TensorEntry], quantization: Quantization) -> PackedWeight:
    bits, is_packed = quantization.bits, quantization.layout == "packed"
    outputs, inputs = _stored_shape(subject, entries["weight_shape"]) if is_packed else entries["weight"].shape
    table = _blocks(outputs, quantization.block[0]), _blocks(inputs, quantization.block[1])
    middle = 1 << (bits - 1) if is_packed else 0  # the code of 0

    def read(tensors: Mapping[str, Tensor]) -> Codes:
        def unpack(first: int, last: int) -> Tensor:
            rows = tensors[TENSORS[quantization.layout][0][0]][first:last]
            return unpack_codes(rows, bits, inputs, 1) if is_packed else rows

        scales, zeros = tensors["weight_scale"].reshape(table), tensors.get("weight_zero_point")
        if zeros is None:
            zeros = torch.full(table, middle)
        elif zeros.dtype == torch.int32:
            zeros = unpack_codes(zeros, bits, outputs, 0)
        else:
            zeros = zeros.reshape(table).int() + middle
        groups = _groups(subject, tensors, inputs, quantization)
        columns = groups if quantization.act_order else quantization.block[1]
        return Codes((outputs, inputs), unpack, scales, zeros, _numbers(outputs, quantization.block[0]), columns)

    zero_points = entries.get("weight_zero_point")
    packs_zeros = is_packed and zero_points is not None and zero_points.dtype == torch.int32
    specs = {
        "weight_packed": ((torch.int32,), (outputs, _words(inputs, bits))),
        "weight": ((torch.int8, torch.float8_e4m3fn), (outputs, inputs)),
        "weight_scale": (FLOATS, table),
        "weight_shape": ((torch.int64, torch.int32), (2,)),
        "weight_zero_point": ((torch.int32,), (_words(table[0], bits), table[1]))
        if packs_zeros
        else ((torch.int8,), table),
        "weight_g_idx": ((torch.int32, torch.int64), (inputs,)),
    }
    return PackedWeight((outputs, inputs), specs, read)


def _float8_weight(subject: str, entries: Mapping[str, TensorEntry], quantization: Quantization) -> PackedWeight:
    weight, scale = entries
    *experts, outputs, inputs = shape = entries[weight].shape
    count, (height, width) = math.prod(experts), quantization.block
    if weight == PAIR and outputs % (2 * max(1, height)):
        raise ValueError(
            f"{subject}.{weight} has {outputs} outputs; in {quantization.text} its two halves must be whole blocks"
        )
    height = height or outputs // (1 + (weight == PAIR))
    table = _blocks(outputs, height), _blocks(inputs, width)

    def read(tensors: Mapping[str, Tensor]) -> Codes:
        scales = tensors[scale].reshape(count * table[0], table[1])
        scales = scales.view(torch.float8_e8m0fnu).float() if scales.dtype in POWERS else scales
        codes, zeros = tensors[weight].view(count * outputs, inputs), torch.zeros(table[1]).expand(scales.shape)
        rows = torch.arange(count)[:, None] * table[0] + _numbers(outputs, height)
        return Codes((len(codes), inputs), lambda first, last: codes[first:last], scales, zeros, rows.view(-1), width)

    specs = {weight: ((torch.float8_e4m3fn,), shape), scale: ((*FLOATS, *POWERS), (*experts, *table))}
    return PackedWeight(shape, specs, read)


def _stored_shape(subject: str, entry: TensorEntry) -> tuple[int, int]:
    """[O, I], by the tensor weight_shape."""
    values = entry.give().tolist() if tuple(entry.shape) == (2,) and not entry.dtype.is_floating_point else []
    if len(values) != 2 or min(values) < 0:
        raise ValueError(
            f"{subject}.weight_shape is {entry.dtype} {list(entry.shape)} of {values}; it must be two sizes"
        )
    return values[0], values[1]


LAYOUTS: dict[str, Callable[[str, Mapping[str, TensorEntry], Quantization], PackedWeight]] = {
    "gptq": _gptq_weight,
    "awq": _awq_weight,
    "packed": _compressed_weight,
    "plain": _compressed_weight,
    FLOAT8: _float8_weight,
}

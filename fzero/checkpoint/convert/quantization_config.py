"""The quantization_config of a config.json of `transformers`: GPTQ, AWQ, compressed-tensors, FP8 and MXFP4.

Each entry is used, is known to change nothing about what the codes mean, or is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero.core.text_parsing import expect_entries, nearest, short

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


class Quantization(NamedTuple):
    """How weights are in codes."""

    layout: str  # see quantized_tensors
    text: str  # for messages
    bits: int  # of a code
    block: tuple[int, int]  # outputs and inputs with one scale; 0 for all
    zero_shift: int = 0  # what is added to a zero-point as GPTQ stores it
    act_order: bool = False  # whether a tensor says the group of each input
    activations: str = ""  # what the config quantises activations to, which fzero does not
    dtype: torch.dtype | None = None  # of the model, by its config.json


# How codes were searched for, by which program, and by what they are to be run. Which layers have some, names tell.
UNUSED_TEXT = """
    act_group_aware activation_scale_ub amp autoround_version backend batch_size block_name_to_quantize
    cache_block_outputs damp_auto_increment damp_percent dataset dequantize disable_exllama do_fuse enable_minmax_tuning
    enable_quanted_input exllama_config failsafe fuse_max_seq_len global_compression_ratio gradient_accumulate_steps
    hyb_act ignore ignored_layers iters lm_head low_gpu_mem_usage lr max_input_length meta minmax_lr
    model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block modules_in_block_to_quantize
    modules_to_convert modules_to_fuse modules_to_not_convert mse nsamples observer observer_kwargs offload_to_disk
    offload_to_disk_path pad_token_id parallel_packing provider quant_method run_compressed scale_dtype seqlen
    static_groups sym targets tokenizer true_sequential use_cuda_fp16 use_exllama use_optimized_inference zp_dtype
"""
UNUSED = frozenset(UNUSED_TEXT.split())
MXFP4 = "mxfp4"  # of gpt-oss's experts, see tensor_files
FLOAT8 = "float8"  # NAME beside NAME_scale_inv
CHANNELS = -1  # a group_size: one scale for all inputs of an output


def quantization_of(hf: Mapping[str, Any], source: str) -> Quantization | None:
    """How the weights of a config.json's model are in codes, None where it says nothing.

    Raises ValueError naming what fzero does not read."""
    table = hf.get("quantization_config")
    if table is None:
        return None
    readers = {
        "gptq": _read_gptq,
        "awq": _read_awq,
        "compressed-tensors": _read_compressed,
        "fp8": _read_fp8,
        "fbgemm_fp8": _read_fbgemm,
        MXFP4: _read_mxfp4,
    }
    method = table.get("quant_method") if isinstance(table, dict) else None
    read = readers.get(str(method))
    if read is None:
        actual = f"has quant_method {short(method)}" if method else f"is {short(table)}"
        methods = " or ".join(map(repr, readers))
        raise ValueError(
            f"{source}: quantization_config {actual}; fzero reads None or a quant_method of {methods} only"
        )
    quantization = read(table, f"{source}: quantization_config")
    name = hf.get("dtype") or hf.get("torch_dtype")
    if name is not None and name not in DTYPES:
        raise ValueError(f"{source}: dtype is {short(name)}; of weights in codes it must be one of {', '.join(DTYPES)}")
    return quantization if name is None or quantization.dtype else quantization._replace(dtype=DTYPES[name])


def note_of(quantization: Quantization) -> str:
    """The line that says what becomes of the weights."""
    dtype = str(quantization.dtype).removeprefix("torch.") if quantization.dtype else "the dtype of their scales"
    line = f"weights in codes ({quantization.text}) are dequantised to {dtype} as they are read, and take its memory"
    activations = f"; activations, which the config quantises to {quantization.activations}, are not quantised"
    return line + activations * bool(quantization.activations)


def _expect_known(
    table: Mapping[str, Any], types: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]], source: str
) -> None:
    """Raise ValueError for an entry of another type, of none of its allowed values, or without a known meaning."""
    expect_entries(table, types, source)
    used = {name.removesuffix("?") for name in types}
    for name, value in table.items():
        if name in allowed:
            if value is not None and value not in allowed[name]:
                supported = " or ".join(map(repr, allowed[name])) or "null"
                raise ValueError(f"{source}: {name} is {short(value)}; fzero reads {supported} only")
        elif name not in used | UNUSED and value not in (None, {}, []):
            meant = nearest(name, sorted(used | set(allowed)))
            raise ValueError(
                f"{source}: {name} is {short(value)}{meant}; fzero does not know what that changes. If it changes "
                "nothing, take it out of the file"
            )


def _expect_group(size: Any, source: str) -> int:
    """The inputs of a group, 0 for all."""
    if size != CHANNELS and size < 1:
        raise ValueError(f"{source}: group_size is {size}; it must be at least 1, or {CHANNELS}")
    return 0 if size == CHANNELS else size


COMMON: dict[str, Sequence[Any]] = {"pack_dtype": ("int32",), "is_marlin_format": (False,), "data_type": ("int",)}
PACKED = {"bits": int, "group_size": int}


def _read_gptq(table: dict[str, Any], source: str) -> Quantization:
    versions = ("gptq", "gptq_v2")
    allowed = {**COMMON, "bits": (2, 3, 4, 8), "checkpoint_format": versions, "format": versions, "method": ("gptq",)}
    types = PACKED | {"desc_act?": bool | None, "dynamic?": dict | None}
    _expect_known(table, types, allowed, source)
    group = _expect_group(table["group_size"], source)
    formats = {table[name] for name in ("checkpoint_format", "format") if table.get(name)} or {"gptq"}
    if len(formats) > 1:
        raise ValueError(f"{source}: checkpoint_format and format are {' and '.join(sorted(formats))}; leave one out")
    for pattern, options in (table.get("dynamic") or {}).items():
        if not pattern.startswith("-:"):  # else layers that have no codes
            raise ValueError(
                f"{source}: dynamic gives {short(pattern)} {short(options)}; fzero reads one kind of codes"
            )
    version, order = formats.pop(), bool(table.get("desc_act"))
    text = f"GPTQ, {table['bits']} bits, {_text((1, group))}{' by order of activations' * order}"
    return Quantization("gptq", text, table["bits"], (1, group), int(version == "gptq"), order)


def _read_awq(table: dict[str, Any], source: str) -> Quantization:
    table = {**table, **{name: str(table[name]).lower() for name in ("version", "format") if table.get(name)}}
    allowed = {**COMMON, "bits": (4,), "zero_point": (True,), "desc_act": (False,), "method": ("awq",)}
    allowed |= dict.fromkeys(("version", "format", "checkpoint_format"), ("gemm",))
    allowed |= {"backend": ("auto", "autoawq", "gemm")}
    _expect_known(table, PACKED, allowed, source)
    group = _expect_group(table["group_size"], source)
    return Quantization("awq", f"AWQ, 4 bits, {_text((1, group))}", 4, (1, group))


def _read_fp8(table: dict[str, Any], source: str) -> Quantization:
    allowed: dict[str, Sequence[Any]] = {
        "activation_scheme": ("dynamic", "static"),
        "expert_dtype": ("fp8",),
        "fmt": ("e4m3",),
        "kv_cache_scheme": (),
        "scale_fmt": ("float", "ue8m0"),  # each dtype of scales says which it is
    }
    _expect_known(table, {"weight_block_size?": list | None}, allowed, source)
    sizes = table.get("weight_block_size", [128, 128])
    block = (0, 0) if sizes is None else _expect_sizes(sizes, f"{source}: weight_block_size")
    return Quantization(FLOAT8, f"FP8, {_text(block)}", 8, block, activations="float8")


def _read_fbgemm(table: dict[str, Any], source: str) -> Quantization:
    _expect_known(table, {}, {}, source)
    return Quantization("plain", "FBGEMM FP8, channels", 8, (1, 0), activations="float8")


def _read_mxfp4(table: dict[str, Any], source: str) -> Quantization:
    _expect_known(table, {}, {}, source)
    return Quantization(MXFP4, "MXFP4", 4, (1, 32), dtype=torch.bfloat16)


# The type of the numbers that the codes of a format are, and the bits of a code.
FORMATS = {
    "pack-quantized": (("int",), (2, 4, 8)),
    "int-quantized": (("int",), (8,)),
    "float-quantized": (("float",), (8,)),
    "naive-quantized": (("int", "float"), (8,)),
}


def _read_compressed(table: dict[str, Any], source: str) -> Quantization:
    allowed: dict[str, Sequence[Any]] = {
        "format": tuple(FORMATS),
        "kv_cache_scheme": (),
        "quantization_status": ("compressed", "frozen"),
        "transform_config": ({}, {"config_groups": {}}),
    }
    _expect_known(
        table, {"config_groups": dict, "format": str, "sparsity_config?": dict | None, "version?": str}, allowed, source
    )
    sparsity = table.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ValueError(f"{source}: sparsity_config is {short(sparsity)}; fzero reads a format of 'dense' only")
    expect_entries(table["config_groups"], dict.fromkeys(table["config_groups"], dict), f"{source}: config_groups")
    groups = [
        _read_group(group, table["format"], f"{source}: {name}") for name, group in table["config_groups"].items()
    ]
    if not groups or any(group[:-2] != groups[0][:-2] for group in groups):
        kinds = "; ".join(group.text for group in groups) or "nothing"
        raise ValueError(f"{source}: config_groups has {kinds}; fzero reads one kind of codes in a folder")
    activations = " and ".join(dict.fromkeys(group.activations for group in groups if group.activations))
    return groups[0]._replace(activations=activations)


def _read_group(group: dict[str, Any], form: str, source: str) -> Quantization:
    """The codes of a group of layers."""
    types = {"weights": dict, "input_activations?": dict | None}
    _expect_known(group, types, {"output_activations": (), "format": (form,)}, source)
    weights, inputs = group["weights"], group.get("input_activations")
    kinds, bits = FORMATS[form]
    types = {"num_bits": int, "type": str, "symmetric?": bool, "group_size?": int | None, "strategy?": str | None}
    orders = ("weight", "static", False, *(("group", "dynamic") if form == "pack-quantized" else ()))
    allowed = {"num_bits": bits, "type": kinds, "dynamic": (False,), "actorder": orders}
    allowed |= {"symmetric": (True,)} if weights.get("type") == "float" else {}
    _expect_known(weights, types | {"block_structure?": list | None}, allowed, f"{source}: weights")
    block, order = _block(weights, f"{source}: weights"), weights.get("actorder") in ("group", "dynamic")
    text = f"compressed-tensors {form}, {weights['type']}{weights['num_bits']}, {_text(block)}"
    layout = "packed" if form == "pack-quantized" else "plain"
    activations = f"{inputs.get('type', 'int')}{inputs.get('num_bits', 8)}" if inputs else ""
    return Quantization(layout, text, weights["num_bits"], block, 0, order, activations)


def _block(weights: Mapping[str, Any], source: str) -> tuple[int, int]:
    """The outputs and inputs with one scale, by the strategy."""
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == CHANNELS else "group")
    if strategy == "group":
        expect_entries(weights, {"group_size": int}, source)
        return 1, _expect_group(size, source)
    if strategy == "block":
        return _expect_sizes(weights.get("block_structure"), f"{source}: block_structure")
    blocks = {"channel": (1, 0), "tensor": (0, 0)}
    if strategy not in blocks:
        raise ValueError(
            f"{source}: strategy is {short(strategy)}; fzero reads 'group', 'channel', 'tensor' and 'block' only"
        )
    return blocks[strategy]


def _expect_sizes(sizes: Any, subject: str) -> tuple[int, int]:
    """The outputs and inputs of a block."""
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        raise ValueError(f"{subject} is {short(sizes)}; it must be two numbers of at least 1")
    return sizes[0], sizes[1]


def _text(block: tuple[int, int]) -> str:
    """What has one scale."""
    outputs, inputs = block
    if outputs == 1:
        return f"groups of {inputs}" if inputs else "channels"
    return f"blocks of {outputs} x {inputs}" if outputs else "one scale"

"""Folders of transformers in codes: GPTQ, AWQ, compressed-tensors, FP8 and MXFP4. The packers here follow the
published layouts bit by bit; what is read is compared with the numbers that the codes stand for."""

import json
import re
from pathlib import Path

import chats
import numpy as np
import pytest
import torch
from close import assert_close, assert_same
from hf_cases import CASES, copy_of, hf, save, theirs, tokens
from safetensors.torch import load_file, save_file

import fzero
from fzero import models
from fzero.checkpoint import convert, huggingface
from fzero.checkpoint.convert import quantized_tensors
from fzero.checkpoint.convert.quantization_config import quantization_of
from fzero.checkpoint.convert.quantized_tensors import dequantized_tensors
from fzero.checkpoint.convert.tensor_files import TensorEntry, dequantize
from fzero.core import pytree

GROUP = 8


def stream(codes, bits, along=1):
    """int32 words: the bits of the codes of a row, or of a column, one after the other, the lowest first."""
    if along == 0:
        return stream(codes.t(), bits).t().contiguous()
    flat = (codes.numpy().astype(np.int64)[:, :, None] >> np.arange(bits)) & 1
    flat = flat.reshape(len(codes), -1).astype(np.uint8)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return torch.from_numpy(np.packbits(flat, axis=1, bitorder="little").view("<i4").copy())


def drawn(outputs, inputs, bits, group, seed):
    """(codes [O, I], zero-points and scales in float16 [O, G], the group of each input)."""
    g = torch.Generator().manual_seed(seed)
    group = group or inputs
    count, draw = -(-inputs // group), lambda *shape: torch.randint(0, 1 << bits, shape, generator=g)
    scales = (torch.rand(outputs, count, generator=g) * 0.3 + 0.1) / (1 << bits)
    return draw(outputs, inputs), draw(outputs, count), scales.half(), torch.arange(inputs) // group


def meant(codes, zeros, scales, groups, dtype=torch.float16):
    return ((codes - zeros[:, groups]).double() * scales.double()[:, groups]).to(dtype)


def gptq(outputs, inputs, seed, bits=4, group=GROUP, order=False, version="gptq"):
    """(the tensors of a weight, the weight, the quantization_config)."""
    codes, zeros, scales, groups = drawn(outputs, inputs, bits, group, seed)
    if order:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
    stored = (zeros - 1) % (1 << bits) if version == "gptq" else zeros
    tensors = {
        "qweight": stream(codes, bits).t().contiguous(), "scales": scales.t().contiguous(),
        "qzeros": stream(stored, bits, along=0).t().contiguous(), "g_idx": groups.int(),
    }  # fmt: skip
    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": order, "sym": False}
    return tensors, meant(codes, zeros, scales, groups), config | {"checkpoint_format": version, "damp_percent": 0.1}


def awq(outputs, inputs, seed):
    codes, zeros, scales, groups = drawn(outputs, inputs, 4, GROUP, seed)
    turned = torch.arange(outputs).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
    tensors = {"qweight": stream(codes.t()[:, turned], 4), "qzeros": stream(zeros.t()[:, turned], 4)}
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "GEMM", "zero_point": True}
    return tensors | {"scales": scales.t().contiguous()}, meant(codes, zeros, scales, groups), config


def compressed(form, inputs=None, **weights):
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return config | {"config_groups": {"group_0": group | {"input_activations": inputs}}, "ignore": ["lm_head"]}


def packed(outputs, inputs, seed, bits=4, group=GROUP, zero_points="stream", order=False):
    codes, zeros, scales, groups = drawn(outputs, inputs, bits, group, seed)
    tensors = {"weight_packed": stream(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(codes.shape)}
    if zero_points == "stream":
        tensors["weight_zero_point"] = stream(zeros, bits, along=0)
    elif zero_points == "plain":
        tensors["weight_zero_point"] = (zeros - (1 << (bits - 1))).to(torch.int8)
    else:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    if order:
        groups = groups.flip(0)
        tensors["weight_g_idx"] = groups.int()
    kind = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    config = compressed(
        "pack-quantized",
        num_bits=bits,
        type="int",
        **kind,
        symmetric=not zero_points,
        actorder="group" if order else None,
    )
    return tensors, meant(codes, zeros, scales, groups), config


def plain(outputs, inputs, seed, kind="int", strategy="channel"):
    """Numbers of one byte, of layers whose inputs are quantised too."""
    codes, _, scales, _ = drawn(outputs, inputs, 8, 0, seed)
    weight = (codes - 128).to(torch.int8) if kind == "int" else (codes / 4 - 32).to(torch.float8_e4m3fn)
    options, wide = {}, scales
    if strategy == "tensor":
        scales, wide = scales[0], scales[:1]
    elif strategy == "block":
        scales = torch.rand(-(-outputs // 16), -(-inputs // GROUP)).half()
        wide = scales.repeat_interleave(16, 0)[:outputs].repeat_interleave(GROUP, 1)[:, :inputs]
        options = {"block_structure": [16, GROUP]}
    config = compressed(
        f"{kind}-quantized", {"num_bits": 8, "type": kind, "dynamic": True, "strategy": "token"},
        num_bits=8, type=kind, strategy=strategy, **options,
    )  # fmt: skip
    values = (weight.double() * wide.double()).half()
    return {"weight": weight, "weight_scale": scales, "input_scale": torch.ones(1)}, values, config


def fp8(*shape, seed=0, block=(24, 20), scale_dtype=torch.float16):
    """Of a matrix, or of one for each expert; blocks that no size is a multiple of, None for one scale of all."""
    g, (*experts, outputs, inputs) = torch.Generator().manual_seed(seed), shape
    height, width = block or (outputs, inputs)
    codes = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
    weight = torch.where(codes & 127 == 127, 5, codes).view(torch.float8_e4m3fn)  # the others are NaN
    scales = torch.rand(*experts, -(-outputs // height), -(-inputs // width), generator=g) * 1e-2 + 1e-3
    scales = scales.to(scale_dtype)
    wide = scales.repeat_interleave(height, -2)[..., :outputs, :].repeat_interleave(width, -1)[..., :inputs]
    values = (weight.double() * wide.double()).to(scale_dtype)
    scheme = {"activation_scheme": "dynamic" if block else "static", "fmt": "e4m3"}
    config = {"quant_method": "fp8", "weight_block_size": list(block) if block else None, **scheme}
    tensors = {"weight": weight, "weight_scale_inv": scales if block else scales.reshape(())}
    return tensors | ({} if block else {"activation_scale": torch.ones(())}), values, config


def fbgemm(outputs, inputs, seed):
    tensors, values, _ = fp8(outputs, inputs, seed=seed, block=(1, inputs))
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}, values, config


KINDS = {
    **{f"gptq {bits}": lambda *n, b=bits: gptq(*n, bits=b) for bits in (2, 3, 4, 8)},
    "gptq by order, v2": lambda *n: gptq(*n, order=True, version="gptq_v2"),
    "gptq one group": lambda *n: gptq(*n, group=0),
    "awq": awq,
    "packed 4": packed,
    "packed 8, by channels": lambda *n: packed(*n, bits=8, group=0, zero_points=""),
    "packed 4, zeros in bytes, by order": lambda *n: packed(*n, zero_points="plain", order=True),
    "int8": plain,
    "float8 of a tensor": lambda *n: plain(*n, kind="float", strategy="tensor"),
    "float8 by blocks": lambda *n: plain(*n, kind="float", strategy="block"),
    "fp8": lambda outputs, inputs, seed: fp8(outputs, inputs, seed=seed),
    "fp8 of a tensor": lambda outputs, inputs, seed: fp8(outputs, inputs, seed=seed, block=None),
    "fbgemm": fbgemm,
}


def entry_of(tensors, config, dtype=None):
    entries = {f"w.{name}": TensorEntry(x.dtype, tuple(x.shape), lambda x=x: x) for name, x in tensors.items()}
    quantization = quantization_of({"quantization_config": config}, "c")
    assert quantization
    read = dequantized_tensors(Path("f"), entries, quantization, dtype)
    assert set(read) == {"w.weight"}
    return read["w.weight"]


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_numbers_that_they_stand_for(kind, monkeypatch):
    monkeypatch.setattr(quantized_tensors, "CHUNK", 1)  # two pieces, as of a large weight
    tensors, weight, config = KINDS[kind](64, 64, 1)
    entry = entry_of(tensors, config)
    assert_same(entry.give().contiguous(), weight)
    assert entry[:2] == (weight.dtype, tuple(weight.shape))
    wide = entry_of(tensors, config, torch.float32).give()  # rounded once
    assert_same(wide.half().contiguous(), weight)
    assert not torch.equal(wide, weight.float())


def test_sizes_that_are_no_whole_words():
    for kind, outputs, inputs in (("packed 4", 5, 13), ("packed 8, by channels", 3, 7), ("gptq 4", 8, 20)):
        tensors, weight, config = KINDS[kind](outputs, inputs, 2)
        assert_same(entry_of(tensors, config).give().contiguous(), weight)


EXPERTS = "w.experts."


def experts_of(seed=0, block=(8, 4), **options):
    """(tensors of two leaves of experts in one, their values, the config)."""
    up, wide, config = fp8(3, 32, 12, seed=seed, block=block, **options)
    down, narrow, _ = fp8(3, 12, 14, seed=seed + 1, block=block, **options)
    tensors = {"gate_up_proj": up["weight"], "down_proj": down["weight"], "down_proj_activation_scale": torch.ones(3)}
    tensors |= {"gate_up_proj_scale_inv": up["weight_scale_inv"], "down_proj_scale_inv": down["weight_scale_inv"]}
    return tensors, {"gate_up_proj": wide, "down_proj": narrow}, config


def read(tensors, config, dtype=None):
    entries = {f"{EXPERTS}{name}": TensorEntry(x.dtype, tuple(x.shape), lambda x=x: x) for name, x in tensors.items()}
    read = dequantized_tensors(Path("f"), entries, quantization_of({"quantization_config": config}, "c"), dtype)
    return {name.removeprefix(EXPERTS): entry.give() for name, entry in read.items()}


def test_fp8_of_experts_in_one_tensor():
    tensors, values, config = experts_of()
    assert_same(read(tensors, config), values)
    one_each = {
        "gate_up_proj_scale_inv": torch.tensor([1.0, 2, 4, 8, 16, 32]).view(3, 2, 1),
        "down_proj_scale_inv": torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1),
    }
    floats = {name: tensors[name].float() for name in values}
    floats["gate_up_proj"] = floats["gate_up_proj"] * one_each["gate_up_proj_scale_inv"].repeat_interleave(16, 1)
    floats["down_proj"] = floats["down_proj"] * one_each["down_proj_scale_inv"]
    assert_same(read(tensors | one_each, {**config, "weight_block_size": None}), floats)
    with pytest.raises(ValueError, match=r"^f: tensor w.experts.gate_up_proj has 32 outputs; .* must be whole blocks"):
        read({name: x for name, x in tensors.items() if "up" in name}, {**config, "weight_block_size": [32, 4]})


def test_fp8_with_scales_that_are_powers_of_two():
    tensors, _, config = fp8(48, 40)
    powers = torch.randint(100, 150, tensors["weight_scale_inv"].shape, dtype=torch.uint8)
    scales = torch.ldexp(torch.ones(powers.shape), powers.int() - 127)
    expected = entry_of(tensors | {"weight_scale_inv": scales}, config, torch.bfloat16).give()
    for stored in (powers, powers.view(torch.float8_e8m0fnu)):
        entry = entry_of(tensors | {"weight_scale_inv": stored}, config | {"scale_fmt": "ue8m0"}, torch.bfloat16)
        assert_same(entry.give(), expected)
        with pytest.raises(ValueError, match=r"^f: tensor w.weight_scale_inv is .*, and config.json has no dtype"):
            entry_of(tensors | {"weight_scale_inv": stored}, config)


@pytest.mark.slow
def test_transformers_has_the_same_numbers_of_fp8():
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(integration.Fp8Dequantize, "_dequantize_one"):
        pytest.skip("this version of transformers has no _dequantize_one")
    convert_one = integration.Fp8Dequantize(None)._dequantize_one
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tensors, _, config = fp8(128, 96, block=(32, 32), scale_dtype=torch.float32)
        assert_same(entry_of(tensors, config, dtype).give(), convert_one(*tensors.values(), dtype))
        tensors, values, config = experts_of(block=(4, 2), scale_dtype=torch.float32)
        expected = {name: convert_one(tensors[name], tensors[f"{name}_scale_inv"], dtype) for name in values}
        assert_same(read(tensors, config, dtype), expected)


# ---- folders ----


def in_codes(folder, to, make, **changes):
    """(a copy of a folder whose layers are in codes, one of what they stand for)."""
    stored = load_file(folder / "model.safetensors")
    coded, dense, config = dict(stored), dict(stored), {}
    for seed, name in enumerate(name for name in stored if ".layers." in name and stored[name].dim() == 2):
        stem = name.removesuffix(".weight")
        tensors, dense[name], config = make(*stored[name].shape, seed)
        del coded[name]
        coded |= {f"{stem}.{part}": x.clone() for part, x in tensors.items()}
    one = copy_of(folder, to / "codes", quantization_config=config | changes, dtype="float16")
    two = copy_of(folder, to / "dense")
    save_file(coded, one / "model.safetensors")
    save_file(dense, two / "model.safetensors")
    return one, two


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save(theirs("llama"), tmp_path_factory.mktemp("llama") / "model")


ACTIVATIONS = {"int8": "int8", "fp8": "float8"}


@pytest.mark.parametrize("kind", ["gptq by order, v2", "awq", "packed 4", "int8", "fp8"])
def test_a_folder_is_that_of_its_numbers(kind, llama, tmp_path):
    one, two = in_codes(llama, tmp_path, KINDS[kind])
    source = convert.open_source(one)
    params, (config, expected) = convert.load(source), huggingface.load_hf(two)
    assert source.config == config
    assert_same(pytree.named_leaves(params), pytree.named_leaves(expected))
    (note,) = source.notes
    assert "are dequantised to float16" in note
    told = re.findall("activations, which the config quantises to (.*), are not", note)
    assert told == ([ACTIVATIONS[kind]] if kind in ACTIVATIONS else [])
    params = pytree.map(lambda leaf: leaf.float(), params)
    ours = models.logits(models.build(config), params, {"tokens": tokens(2)})
    reference = hf.AutoModelForCausalLM.from_pretrained(two, dtype=torch.float32)(tokens(2)).logits
    assert_close(ours, reference.detach(), rtol=1e-4, atol=1e-5)


def test_a_bias_of_zeros_that_no_layer_has_changes_nothing(llama, tmp_path):
    one, two = in_codes(llama, tmp_path, gptq)
    stored = load_file(one / "model.safetensors")
    bias = "model.layers.0.self_attn.q_proj.bias"
    save_file({**stored, bias: torch.zeros(32)}, one / "model.safetensors")
    assert_same(pytree.named_leaves(huggingface.load_hf(one)[1]), pytree.named_leaves(huggingface.load_hf(two)[1]))
    save_file({**stored, bias: torch.ones(32)}, one / "model.safetensors")
    with pytest.raises(ValueError, match=f"are unexpected .*{bias}"):
        huggingface.load_hf(one)


def test_folders_of_modelopt_are_refused(llama, tmp_path):
    folder, scale = copy_of(llama, tmp_path / "opt"), "model.layers.0.mlp.up_proj.weight_scale"
    save_file({**load_file(folder / "model.safetensors"), scale: torch.ones(())}, folder / "model.safetensors")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(ValueError, match=r"hf_quant_config.json: the weights are in codes of ModelOpt"):
        huggingface.load_hf(folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3", "qwen3-moe", "deepseek", "gpt-oss"])
def test_transformers_reads_the_same_of_a_folder(case, tmp_path, monkeypatch):
    kind, sizes = CASES[case]
    monkeypatch.setitem(CASES, case, (kind, sizes | {"hidden_size": 64, "intermediate_size": 64}))
    folder = save(theirs(case).bfloat16(), tmp_path / "model")
    stored, config = load_file(folder / "model.safetensors"), HOW["quantization_config"]
    coded = dict(stored)
    for seed, (name, x) in enumerate(stored.items()):
        if case == "gpt-oss" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            coded[f"{name}_blocks"], coded[f"{name}_scales"] = blocks_and_scales(x.shape[2], seed, x.shape[1] // 32)
            del coded[name]
        elif case != "gpt-oss" and ".layers." in name and x.dim() == 2 and not name.endswith("mlp.gate.weight"):
            tensors, _, config = fp8(*x.shape, seed=seed, block=(2, 2), scale_dtype=torch.float32)
            coded |= {name: tensors["weight"], f"{name}_scale_inv": tensors["weight_scale_inv"]}
    if case == "deepseek":  # what a second head has
        coded["model.layers.61.eh_proj.weight"] = torch.zeros(64, 128)
    config = config | {"modules_to_not_convert": ["lm_head", "mlp.gate", "mlp.router", "self_attn.sinks"]}
    one = copy_of(folder, tmp_path / "codes", quantization_config=config)
    save_file(coded, one / "model.safetensors", metadata={"format": "pt"})
    reference = hf.AutoModelForCausalLM.from_pretrained(one, dtype=torch.bfloat16)
    two = save(reference, tmp_path / "dense")
    assert "quantization_config" not in json.loads((two / "config.json").read_text())
    (config, params), (_, expected) = huggingface.load_hf(one), huggingface.load_hf(two)
    params, expected = (pytree.map(lambda leaf: leaf.float(), tree) for tree in (params, expected))  # routers are wider
    assert_same(params, expected)
    ours = models.logits(models.build(config), params, {"tokens": tokens(2)})
    assert_close(ours, reference.float()(tokens(2)).logits.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_decoder_by_its_own_code_has_them(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    phi = hf.PhiForCausalLM(hf.PhiConfig(**sizes, num_attention_heads=4, max_position_embeddings=64))
    one, two = in_codes(save(phi, tmp_path / "phi"), tmp_path, awq)
    source, expected = convert.open_source(one), convert.open_source(two)
    assert_same(pytree.named_leaves(convert.load(source)), pytree.named_leaves(convert.load(expected)))
    assert "AWQ" in source.notes[-1] and "quantization_config" not in source.config.text
    named = pytree.named_leaves(fzero.models.init_params(fzero.from_huggingface(one), fzero.random.key(0)))
    assert_same(named, pytree.named_leaves(fzero.models.init_params(fzero.from_huggingface(two), fzero.random.key(0))))


@pytest.mark.slow
def test_fzero_generates_from_codes(tmp_path, fz):
    chats.qwen3_folder(tmp_path / "model")
    one, two = in_codes(tmp_path / "model", tmp_path, gptq)
    chats.write_lines(tmp_path / "prompts.jsonl", [{"prompt": "1+1"}])
    lines = []
    for number, folder in enumerate((one, two)):
        out = tmp_path / f"{number}.jsonl"
        flags = ("--prompts", tmp_path / "prompts.jsonl", "--out", out, "--max-tokens", 6, "--temperature", 0)
        code, said, err = fz("generate", folder, *flags, "--log-probs")
        assert code == 0, err
        assert ("GPTQ, 4 bits" in said + err) == (folder == one)
        lines.append(json.loads(out.read_text()))
    assert lines[0] == lines[1]


# ---- what is refused ----

GPTQ, AWQ = gptq(8, 8, 0)[2], awq(8, 8, 0)[2]
CODED, INT8 = packed(8, 8, 0)[2], plain(8, 8, 0)[2]
FP8 = fp8(8, 8)[2]


def changed(config, **weights):
    """A config of compressed-tensors with other arguments of its weights."""
    group = config["config_groups"]["group_0"]
    return {**config, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **weights}}}}


BAD = {
    "fzero reads None or a quant_method of 'gptq' or 'awq'": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "bits is missing": {"quant_method": "gptq", "group_size": 8},
    "bits is 5; fzero reads 2 or 3 or 4 or 8 only": {**GPTQ, "bits": 5},
    "group_size is 0; it must be at least 1, or -1": {**GPTQ, "group_size": 0},
    "checkpoint_format is 'marlin'; fzero reads 'gptq' or 'gptq_v2' only": {**GPTQ, "checkpoint_format": "marlin"},
    "is_marlin_format is True; fzero reads False only": {**GPTQ, "is_marlin_format": True},
    "checkpoint_format and format are gptq and gptq_v2; leave one out": {**GPTQ, "format": "gptq_v2"},
    "dynamic gives '+:.*down.*' {'bits': 8}": {**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}, "-:lm_head": {}}},
    "rotation is 'hadamard'; fzero does not know what that changes": {**GPTQ, "rotation": "hadamard"},
    "group_sise is 4 (did you mean group_size?)": {**GPTQ, "group_sise": 4},
    "version is 'gemv'; fzero reads 'gemm' only": {**AWQ, "version": "GEMV"},
    "zero_point is False; fzero reads True only": {**AWQ, "zero_point": False},
    "backend is 'llm-awq'": {**AWQ, "backend": "llm-awq"},
    "format is 'marlin-24'; fzero reads 'pack-quantized' or": {**CODED, "format": "marlin-24"},
    "kv_cache_scheme is {'num_bits': 8}; fzero reads null only": {**CODED, "kv_cache_scheme": {"num_bits": 8}},
    "sparsity_config is {'format': 'sparse-24-bitmask'}": {**CODED, "sparsity_config": {"format": "sparse-24-bitmask"}},
    "num_bits is 3; fzero reads 2 or 4 or 8 only": changed(CODED, num_bits=3),
    "type is 'float'; fzero reads 'int' only": changed(INT8, type="float"),
    "strategy is 'tensor_group'; fzero reads": changed(CODED, strategy="tensor_group"),
    "block_structure is None; it must be two numbers": changed(INT8, strategy="block"),
    "actorder is 'group'; fzero reads": changed(INT8, actorder="group"),
    "fzero reads one kind of codes in a folder": {
        **CODED,
        "config_groups": CODED["config_groups"] | {"b": changed(CODED, num_bits=8)["config_groups"]["group_0"]},
    },
    "quant_method 'modelopt'; fzero reads": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "fmt is 'e5m2'; fzero reads 'e4m3' only": {**FP8, "fmt": "e5m2"},
    "expert_dtype is 'fp4'; fzero reads 'fp8' only": {**FP8, "expert_dtype": "fp4"},
    "weight_block_size is [128]; it must be two numbers": {**FP8, "weight_block_size": [128]},
    "rotation is 'hadamard'; fzero does not know": {"quant_method": "mxfp4", "rotation": "hadamard"},
    "W4A16 is ['Linear']; it must be a table": {**CODED, "config_groups": {"W4A16": ["Linear"]}},
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_not_understood_is_refused_by_name(message):
    with pytest.raises(ValueError, match=rf"^c: quantization_config.*{re.escape(message)}") as error:
        quantization_of({"quantization_config": BAD[message]}, "c")
    assert "\n" not in str(error.value)


DAMAGED = {
    "w.qzeros is missing: in GPTQ, 4 bits": lambda t: t.pop("qzeros"),
    "w.g_idx is missing": lambda t: t.pop("g_idx"),
    "w.qweight is torch.int32 [9, 32]; in GPTQ": lambda t: t.update(qweight=torch.zeros(9, 32, dtype=torch.int32)),
    "w.scales is torch.float16 [7, 32]": lambda t: t.update(scales=t["scales"][:7]),
    "w.qweight has shape [4]": lambda t: t.update(qweight=torch.zeros(4, dtype=torch.int32)),
    "w.g_idx has groups 0 to 99; there are 8": lambda t: t["g_idx"].__setitem__(3, 99),
    "tensor w.weight is there twice": lambda t: t.update(weight=torch.zeros(32, 64)),
    "no weight is in codes": lambda t: [t.pop(name) for name in list(t)],
}


@pytest.mark.parametrize("message", DAMAGED)
def test_a_damaged_weight_is_one_line(message):
    tensors, _, config = gptq(32, 64, 1, order=True)
    DAMAGED[message](tensors)
    with pytest.raises(ValueError, match=f"^f: .*{re.escape(message)}") as error:
        entry_of(tensors, config).give()
    assert "\n" not in str(error.value)


DAMAGED_FP8 = {
    "w.weight_scale_inv is missing: in FP8, blocks of 24 x 20": lambda t: t.pop("weight_scale_inv"),
    "w.weight is missing": lambda t: t.pop("weight"),
    "w.weight_scale_inv is torch.float16 [2, 3]; in FP8": lambda t: t.update(
        weight_scale_inv=t["weight_scale_inv"][:2]
    ),
    "w.weight is torch.int8 [64, 48]": lambda t: t.update(weight=t["weight"].view(torch.int8)),
    "w.weight has shape [2, 32, 48]": lambda t: t.update(weight=t["weight"].view(2, 32, 48)),
    "no weight is in codes": lambda t: t.clear(),
}


@pytest.mark.parametrize("message", DAMAGED_FP8)
def test_a_damaged_weight_of_fp8_is_one_line(message):
    tensors, _, config = fp8(64, 48)
    DAMAGED_FP8[message](tensors)
    with pytest.raises(ValueError, match=f"^f: .*{re.escape(message)}") as error:
        entry_of(tensors, config)
    assert "\n" not in str(error.value)


def test_an_order_that_the_config_denies_is_refused():
    tensors, _, config = gptq(32, 64, 1, order=True)
    with pytest.raises(ValueError, match="g_idx is not in order, and by quantization_config it is"):
        entry_of(tensors, config | {"desc_act": False}).give()


def test_gpt2_and_other_families_of_mxfp4_are_refused(llama, tmp_path):
    for case, config in (("gpt2", GPTQ), ("llama", {"quant_method": "mxfp4"})):
        folder = llama if case == "llama" else save(theirs(case), tmp_path / case)
        folder = copy_of(folder, tmp_path / f"{case}-codes", quantization_config=config)
        with pytest.raises(ValueError, match=f"(?i)fzero reads no weights in (GPTQ|MXFP4).* of a {case}"):
            huggingface.load_hf(folder)
        if case == "gpt2":
            with pytest.raises(ValueError, match="it has a quantization_config; fzero reads GPT2LMHeadModel without"):
                fzero.from_huggingface(folder)


# ---- MXFP4: the numbers are the format's, and transformers'; a gpt-oss folder whose experts are so is read ----

E, D, F = 4, 32, 40  # of hf_cases' gpt-oss
HOW = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}


def blocks_and_scales(features, seed, groups=D // 32):
    """Blocks and scales of random codes, the scales near 1."""
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (E, features, groups, 16), generator=g, dtype=torch.uint8)
    return blocks, torch.randint(120, 132, (E, features, groups), generator=g, dtype=torch.uint8)


def number(code):
    """A sign, two bits of exponent with bias 1, one of mantissa; of exponent 0 there are 0 and 0.5."""
    sign, exponent, half = code >> 3, (code >> 1) & 3, code & 1
    size = half / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + half / 2)
    return -size if sign else size


def test_every_code_and_scale_of_mxfp4_is_the_format_s():
    blocks, scales = blocks_and_scales(3, 0, groups=2)
    w = dequantize(blocks, scales)
    assert w.shape == (E, 64, 3)
    for e in range(E):
        for d in range(64):
            for f in range(3):
                byte = int(blocks[e, f, d // 32, d % 32 // 2])
                code = byte >> 4 if d % 2 else byte & 15
                assert float(w[e, d, f]) == number(code) * 2.0 ** (int(scales[e, f, d // 32]) - 127)


def test_the_ends_of_mxfp4_scales():
    ones = torch.full((1, 3, 1, 16), 0x22, dtype=torch.uint8)
    w = dequantize(ones, torch.tensor([[[1], [254], [255]]], dtype=torch.uint8))
    assert (w[0, :, 0] == 2.0**-126).all() and (w[0, :, 1] == 2.0**127).all() and w[0, :, 2].isnan().all()


def test_transformers_has_the_same_numbers_of_mxfp4():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    if not hasattr(mxfp4, "convert_moe_packed_tensors"):
        pytest.skip("this version of transformers has no convert_moe_packed_tensors")
    blocks, scales = blocks_and_scales(F, 1)
    assert_same(dequantize(blocks, scales), mxfp4.convert_moe_packed_tensors(blocks.clone(), scales.clone()))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """(a folder of gpt-oss in bfloat16, its tensors)."""
    folder = save(theirs("gpt-oss").bfloat16(), tmp_path_factory.mktemp("gpt-oss") / "model")
    return folder, load_file(folder / "model.safetensors")


def with_blocks(tensors):
    """The tensors with the experts' first products in MXFP4, and those that these stand for. (The second have rows of
    40, which are no whole blocks.)"""
    packed, whole = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        blocks, scales = blocks_and_scales(2 * F, len(name))
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del packed[name]
        whole[name] = dequantize(blocks, scales)
    return packed, whole


def test_a_folder_with_such_experts_is_read_as_that_of_their_numbers(gpt_oss, tmp_path):
    folder, tensors = gpt_oss
    packed, whole = with_blocks(tensors)
    assert len(packed) > len(tensors)
    one, two = copy_of(folder, tmp_path / "packed", **HOW), copy_of(folder, tmp_path / "whole")
    save_file(packed, one / "model.safetensors")
    save_file(whole, two / "model.safetensors")
    (config, params), (same, expected) = huggingface.load_hf(one), huggingface.load_hf(two)
    assert config == same
    assert_same(pytree.named_leaves(params), pytree.named_leaves(expected))


NAME = "model.layers.0.mlp.experts.gate_up_proj"
BAD_MXFP4 = {
    "no scales": (lambda t: t.pop(f"{NAME}_scales"), f"tensor {NAME}_scales is missing"),
    "no blocks": (lambda t: t.pop(f"{NAME}_blocks"), f"tensor {NAME}_blocks is missing"),
    "another dtype": (
        lambda t: t.update({f"{NAME}_scales": t[f"{NAME}_scales"].float()}),
        f"tensor {NAME}_scales is torch.float32 [4, 80, 1]; in MXFP4 it must be torch.uint8 [4, 80, 1]",
    ),
    "another length": (
        lambda t: t.update({f"{NAME}_blocks": t[f"{NAME}_blocks"][..., :8].contiguous()}),
        f"tensor {NAME}_blocks has shape [4, 80, 1, 8]; in MXFP4 it must be [E, F, G, 16]",
    ),
    "twice": (lambda t: t.update({NAME: torch.zeros(E, D, 2 * F)}), f"tensor {NAME} is there twice, once in MXFP4"),
    "another size": (
        lambda t: t.update(zip((f"{NAME}_blocks", f"{NAME}_scales"), blocks_and_scales(2 * F, 0, groups=2))),
        f"tensor {NAME} has shape [4, 64, 80], config.json asks for [4, 32, 80]",
    ),
}


@pytest.mark.parametrize("what", BAD_MXFP4)
def test_a_damaged_folder_of_mxfp4_is_one_line(what, gpt_oss, tmp_path):
    spoil, said = BAD_MXFP4[what]
    packed, _ = with_blocks(gpt_oss[1])
    spoil(packed)
    folder = copy_of(gpt_oss[0], tmp_path / "bad", **HOW)
    save_file(packed, folder / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        huggingface.load_hf(folder)
    assert "\n" not in str(error.value)

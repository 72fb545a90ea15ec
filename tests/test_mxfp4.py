"""Weights in MXFP4: the numbers are the format's, and transformers'; a gpt-oss folder whose experts are so is read."""

import re

import pytest
import torch
from close import assert_same
from hf_cases import copy_of, save, theirs
from safetensors.torch import load_file, save_file

from fzero.checkpoint import huggingface
from fzero.checkpoint.convert.tensor_files import dequantize
from fzero.core import pytree

E, D, F = 4, 32, 40  # of hf_cases' gpt-oss
HOW = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}


def drawn(features, seed, groups=D // 32):
    """Blocks and scales of random codes, the scales near 1."""
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (E, features, groups, 16), generator=g, dtype=torch.uint8)
    return blocks, torch.randint(120, 132, (E, features, groups), generator=g, dtype=torch.uint8)


def number(code):
    """A sign, two bits of exponent with bias 1, one of mantissa; of exponent 0 there are 0 and 0.5."""
    sign, exponent, half = code >> 3, (code >> 1) & 3, code & 1
    size = half / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + half / 2)
    return -size if sign else size


def test_every_code_and_scale_is_the_format_s():
    blocks, scales = drawn(3, 0, groups=2)
    w = dequantize(blocks, scales)
    assert w.shape == (E, 64, 3)
    for e in range(E):
        for d in range(64):
            for f in range(3):
                byte = int(blocks[e, f, d // 32, d % 32 // 2])
                code = byte >> 4 if d % 2 else byte & 15
                assert float(w[e, d, f]) == number(code) * 2.0 ** (int(scales[e, f, d // 32]) - 127)


def test_the_ends_of_scales():
    ones = torch.full((1, 3, 1, 16), 0x22, dtype=torch.uint8)
    w = dequantize(ones, torch.tensor([[[1], [254], [255]]], dtype=torch.uint8))
    assert (w[0, :, 0] == 2.0**-126).all() and (w[0, :, 1] == 2.0**127).all() and w[0, :, 2].isnan().all()


def test_transformers_has_the_same_numbers():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    if not hasattr(mxfp4, "convert_moe_packed_tensors"):
        pytest.skip("this version of transformers has no convert_moe_packed_tensors")
    blocks, scales = drawn(F, 1)
    assert_same(dequantize(blocks, scales), mxfp4.convert_moe_packed_tensors(blocks.clone(), scales.clone()))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """(a folder of gpt-oss in bfloat16, its tensors)."""
    folder = save(theirs("gpt-oss").bfloat16(), tmp_path_factory.mktemp("gpt-oss") / "model")
    return folder, load_file(folder / "model.safetensors")


def narrowed(tensors):
    """The tensors with the experts' first products in MXFP4, and those that these stand for. (The second have rows of
    40, which are no whole blocks.)"""
    packed, whole = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        blocks, scales = drawn(2 * F, len(name))
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del packed[name]
        whole[name] = dequantize(blocks, scales)
    return packed, whole


def test_a_folder_with_such_experts_is_read_as_that_of_their_numbers(plain, tmp_path):
    folder, tensors = plain
    packed, whole = narrowed(tensors)
    assert len(packed) > len(tensors)
    one, two = copy_of(folder, tmp_path / "packed", **HOW), copy_of(folder, tmp_path / "whole")
    save_file(packed, one / "model.safetensors")
    save_file(whole, two / "model.safetensors")
    (config, params), (same, expected) = huggingface.load_hf(one), huggingface.load_hf(two)
    assert config == same
    assert_same(pytree.named_leaves(params), pytree.named_leaves(expected))


NAME = "model.layers.0.mlp.experts.gate_up_proj"
BAD = {
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
        lambda t: t.update(zip((f"{NAME}_blocks", f"{NAME}_scales"), drawn(2 * F, 0, groups=2))),
        f"tensor {NAME} has shape [4, 64, 80], config.json asks for [4, 32, 80]",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_damaged_folder_is_one_line(what, plain, tmp_path):
    spoil, said = BAD[what]
    packed, _ = narrowed(plain[1])
    spoil(packed)
    folder = copy_of(plain[0], tmp_path / "bad", **HOW)
    save_file(packed, folder / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        huggingface.load_hf(folder)
    assert "\n" not in str(error.value)


def test_another_quantisation_is_refused(plain, tmp_path):
    with pytest.raises(ValueError, match=r"quantization_config is .*None or a quant_method of .*'mxfp4' only"):
        huggingface.load_hf(copy_of(plain[0], tmp_path / "bad", quantization_config={"quant_method": "hqq"}))

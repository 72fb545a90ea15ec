"""Decoding of one sequence beside llama.cpp: the same weights, in float32, bfloat16, int8 and int4.

    pip install llama-cpp-python gguf
    OMP_NUM_THREADS=1 python benchmarks/beside_llama.py --out benchmarks/results/beside-llama.json

A prompt of 128 tokens, then 128 new ones, greedy; the rate is of the tokens behind the first. Weights of layers are in
codes, embedding and head in bfloat16 (float32 beside float32): Q8_0 and Q4_0 have a float16 scale for 32 numbers,
fzero's int8 and int4 a float32 scale for 64. The two take turns in one process. share: bytes of weights that a token
reads, over its time, over what one pass over a gigabyte reads.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from decoding import MODELS
from gguf import GGMLQuantizationType as Kind
from llama_cpp import Llama
from turns import write_run

import fzero
from fzero import generate, models
from fzero.checkpoint.convert import huggingface
from fzero.core import pytree

PROMPT, NEW = 128, 128
KINDS = {"fp32": Kind.F32, "bf16": Kind.BF16, "int8": Kind.Q8_0, "int4": Kind.Q4_0}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(path: Path, config: models.LlamaConfig, tensors: dict[str, torch.Tensor], kind: str) -> None:
    """The model of a folder of transformers as llama.cpp reads it, without a vocabulary."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_len)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.d_model // config.n_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for name, tensor in tensors.items():
        stem, x = name.removesuffix(".weight"), tensor.float().numpy()
        if stem in OUTSIDE:
            target, stored = OUTSIDE[stem], Kind.F32 if kind == "fp32" else Kind.BF16
        else:
            _, _, layer, *rest = stem.split(".")
            target, stored = f"blk.{layer}.{NAMES['.'.join(rest)]}", KINDS[kind]
        if target.endswith(("attn_q", "attn_k")):  # pairs of RoPE side by side
            heads = config.n_heads if target.endswith("attn_q") else config.n_kv_heads
            x = x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
        stored = Kind.F32 if x.ndim == 1 else stored
        writer.add_tensor(f"{target}.weight", gguf.quants.quantize(np.ascontiguousarray(x), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def by_llama_cpp(llama: Llama, prompt: list[int], new: int) -> list[int]:
    llama.reset()
    llama.eval(prompt)
    ids: list[int] = []
    while True:
        logits = np.ctypeslib.as_array(llama._ctx.get_logits_ith(-1), shape=(llama.n_vocab(),))
        ids.append(int(logits.argmax()))
        if len(ids) == new:
            return ids
        llama.eval(ids[-1:])


def cell(name: str, kind: str, rounds: int, read_rate: float) -> dict[str, Any]:
    """The rates of both sides, tokens/s, and their ratio."""
    config = MODELS[name]
    model, dtype = models.build(config), torch.float32 if kind == "fp32" else torch.bfloat16
    params = models.init_params(model, fzero.random.key(0), dtype)
    prompt = torch.randint(0, config.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        huggingface.save_hf(Path(folder, "model"), config, params)
        from safetensors.torch import load_file

        tensors = {k: v for path in Path(folder, "model").glob("*.safetensors") for k, v in load_file(path).items()}
        write_gguf(Path(folder, "model.gguf"), config, tensors, kind)
        size = Path(folder, "model.gguf").stat().st_size
        llama = Llama(
            str(Path(folder, "model.gguf")), n_ctx=512, n_batch=512, n_threads=1, n_threads_batch=1, verbose=False
        )
    if kind in ("int8", "int4"):
        model = models.quantized(model, kind)
        params = models.quantize_weights(model, params)

    def by_fzero(new: int) -> list[int]:
        asked = generate.Prompt(tuple(prompt), generate.Sampling(0.0, max_tokens=new))
        (completion,) = generate.completions(model, params, [asked], options=generate.GenerateOptions(rows=1))
        return list(completion.ids)

    sides: dict[str, Callable[[int], list[int]]] = {
        "llama_cpp": lambda new: by_llama_cpp(llama, prompt, new),
        "fzero": by_fzero,
    }
    rates: dict[str, list[float]] = {side: [] for side in sides}
    texts: dict[str, list[int]] = {}
    for i in range(-1, rounds):
        for side in list(sides)[:: 1 if i % 2 else -1]:
            seconds = []
            for new in (1, NEW):
                begin = time.perf_counter()
                texts[side] = sides[side](new)
                seconds.append(time.perf_counter() - begin)
            rates[side] += [(NEW - 1) / (seconds[1] - seconds[0])] if i >= 0 else []
    ratios = [a / b for a, b in zip(rates["fzero"], rates["llama_cpp"])]
    embedding = params["embed"]["tokens"].nbytes if "embed" in params and "tokens" in params["embed"] else 0
    read = sum(leaf.nbytes for leaf in pytree.leaves(params)) - embedding
    row: dict[str, Any] = {"name": f"{name} {kind}", "ratio": {"median": statistics.median(ratios)}}
    row["ratio"] |= {"min": min(ratios), "max": max(ratios)}
    row |= {f"{side}_tokens_per_s": statistics.median(rate) for side, rate in rates.items()}
    row["share"] = read * row["fzero_tokens_per_s"] / read_rate
    row |= {"gguf_bytes": size, "bytes_read": read}
    same = [a == b for a, b in zip(*texts.values())]
    return row | {"equal_tokens": same.index(False) if False in same else len(same)}


def read_rate() -> float:
    """Bytes/s of a sum over a gigabyte, the fastest of five."""
    x, best = torch.ones(1 << 28), float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        x.sum()
        best = min(best, time.perf_counter() - begin)
    return x.nbytes / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=["88M"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--out", type=Path)
    args, before = parser.parse_args(), os.getloadavg()
    torch.set_grad_enabled(False)
    rate, cells = read_rate(), []
    for name in args.models:
        for kind in args.kinds:
            cells.append(cell(name, kind, args.rounds, rate))
            print(cells[-1], file=sys.stderr, flush=True)
    if args.out:
        write_run(args.out, before, read_bytes_per_s=rate, cells=cells)


if __name__ == "__main__":
    main()

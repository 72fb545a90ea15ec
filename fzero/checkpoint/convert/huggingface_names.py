"""The names of the tensors of Hugging Face `transformers`: rows that map a leaf of ours to tensors or parts of
tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

OUTER = ("lm_head.", "score.")  # names without the family's prefix begin so


class TensorRow(NamedTuple):
    """A leaf of ours in tensors: `ours[l, e]` is `pattern`, or a part of its last dim."""

    leaf: str
    pattern: str  # with {l} if each layer has its tensor, {e} if each expert has
    transposed: bool = False  # whether theirs is [out, in]
    fused_leaves: tuple[str, ...] = ()  # the leaves of ours that `theirs` consists of, in their order
    prior_leaf: str = ""  # a leaf of the stack before: its layers come first in the numbers of theirs
    in_turn: bool = False  # whether the columns of those `beside` take turns, else one part follows the other


def _dense(w: str, b: str, pattern: str) -> tuple[TensorRow, TensorRow]:
    return TensorRow(w, f"{pattern}.weight"), TensorRow(b, f"{pattern}.bias")


def _fused(
    pattern: str, *leaves: str, transposed: bool = True, prior_leaf: str = "", in_turn: bool = False
) -> tuple[TensorRow, ...]:
    """The rows of leaves that lie in one tensor, one after the other or by columns."""
    return tuple(TensorRow(name, pattern, transposed, leaves, prior_leaf, in_turn) for name in leaves)


QKV = [[f"blocks/attn/{kind}_{n}" for n in "qkv"] for kind in "wb"]
GPT2_ROWS = (
    TensorRow("embed/tokens", "wte.weight"),
    TensorRow("embed/positions", "wpe.weight"),
    *_dense("blocks/ln_1/scale", "blocks/ln_1/bias", "h.{l}.ln_1"),
    *_fused("h.{l}.attn.c_attn.weight", *QKV[0], transposed=False),
    *_fused("h.{l}.attn.c_attn.bias", *QKV[1], transposed=False),
    *_dense("blocks/attn/w_o", "blocks/attn/b_o", "h.{l}.attn.c_proj"),
    *_dense("blocks/ln_2/scale", "blocks/ln_2/bias", "h.{l}.ln_2"),
    *_dense("blocks/mlp/w_in", "blocks/mlp/b_in", "h.{l}.mlp.c_fc"),
    *_dense("blocks/mlp/w_out", "blocks/mlp/b_out", "h.{l}.mlp.c_proj"),
    *_dense("head/norm/scale", "head/norm/bias", "ln_f"),
    TensorRow("head/w", "lm_head.weight"),
    TensorRow("head/score", "score.weight"),
)
EMBED_ROW = TensorRow("embed/tokens", "embed_tokens.weight")
NORM_ROWS = (
    TensorRow("blocks/norm_1/scale", "layers.{l}.input_layernorm.weight"),
    TensorRow("blocks/norm_2/scale", "layers.{l}.post_attention_layernorm.weight"),
)
OUT_NORM_ROWS = (
    TensorRow("blocks/norm_1_out/scale", "layers.{l}.post_attention_layernorm.weight"),
    TensorRow("blocks/norm_2_out/scale", "layers.{l}.post_feedforward_layernorm.weight"),
)
GEMMA_NORM_ROWS = (
    NORM_ROWS[0],
    TensorRow("blocks/norm_2/scale", "layers.{l}.pre_feedforward_layernorm.weight"),
    *OUT_NORM_ROWS,
)
PROJECTIONS = tuple(TensorRow(f"blocks/attn/w_{n}", f"layers.{{l}}.self_attn.{n}_proj.weight", True) for n in "qkvo")
MLP_ROWS = tuple(
    TensorRow(f"blocks/mlp/w_{n}", f"layers.{{l}}.mlp.{n}_proj.weight", True) for n in ("gate", "up", "down")
)
ATTENTION_ROWS = (EMBED_ROW, *NORM_ROWS, *PROJECTIONS)
SCORE_ROW = TensorRow("head/score", "score.weight")  # in place of the head's weights
HEAD_ROWS = (TensorRow("head/norm/scale", "norm.weight"), TensorRow("head/w", "lm_head.weight"), SCORE_ROW)
BIASES = tuple(TensorRow(f"blocks/attn/b_{n}", f"layers.{{l}}.self_attn.{n}_proj.bias") for n in "qkv")
HEAD_NORMS = tuple(TensorRow(f"blocks/attn/norm_{n}/scale", f"layers.{{l}}.self_attn.{n}_norm.weight") for n in "qk")
LLAMA_ROWS = (*ATTENTION_ROWS, *MLP_ROWS, *HEAD_ROWS)
OLMO2_ROWS = (EMBED_ROW, *OUT_NORM_ROWS, *PROJECTIONS, *HEAD_NORMS, *MLP_ROWS, *HEAD_ROWS)
GEMMA_ROWS = (EMBED_ROW, *GEMMA_NORM_ROWS, *PROJECTIONS, *MLP_ROWS, *HEAD_ROWS)
PHI3_ROWS = (
    EMBED_ROW,
    *NORM_ROWS,
    *_fused("layers.{l}.self_attn.qkv_proj.weight", *QKV[0]),
    PROJECTIONS[3],
    *_fused("layers.{l}.mlp.gate_up_proj.weight", "blocks/mlp/w_gate", "blocks/mlp/w_up"),
    MLP_ROWS[2],
    *HEAD_ROWS,
)
# The published layout, which save_pretrained writes.
MIXTRAL_ROWS = (
    *ATTENTION_ROWS,
    TensorRow("blocks/moe/router", "layers.{l}.block_sparse_moe.gate.weight", True),
    TensorRow("blocks/moe/w_gate", "layers.{l}.block_sparse_moe.experts.{e}.w1.weight", True),
    TensorRow("blocks/moe/w_down", "layers.{l}.block_sparse_moe.experts.{e}.w2.weight", True),
    TensorRow("blocks/moe/w_up", "layers.{l}.block_sparse_moe.experts.{e}.w3.weight", True),
    *HEAD_ROWS,
)
# The layout of transformers 5 in memory, which save_pretrained(save_original_format=False) writes.
MIXTRAL_FUSED_ROWS = (
    *ATTENTION_ROWS,
    TensorRow("blocks/moe/router", "layers.{l}.mlp.gate.weight", True),
    *_fused("layers.{l}.mlp.experts.gate_up_proj", "blocks/moe/w_gate", "blocks/moe/w_up"),
    TensorRow("blocks/moe/w_down", "layers.{l}.mlp.experts.down_proj", True),
    *HEAD_ROWS,
)
QWEN3_ROUTER_ROWS = (
    *ATTENTION_ROWS,
    *HEAD_NORMS,
    TensorRow("blocks/moe/router", "layers.{l}.mlp.gate.weight", True),
    *HEAD_ROWS,
)
QWEN3_MOE_ROWS = (
    *QWEN3_ROUTER_ROWS,
    *(
        TensorRow(f"blocks/moe/w_{n}", f"layers.{{l}}.mlp.experts.{{e}}.{n}_proj.weight", True)
        for n in ("gate", "up", "down")
    ),
)
QWEN3_MOE_FUSED_ROWS = (
    *QWEN3_ROUTER_ROWS,
    *_fused("layers.{l}.mlp.experts.gate_up_proj", "blocks/moe/w_gate", "blocks/moe/w_up"),
    TensorRow("blocks/moe/w_down", "layers.{l}.mlp.experts.down_proj", True),
)
EXPERTS = "layers.{l}.mlp.experts"
IN_TURN: dict[str, Any] = {"transposed": False, "in_turn": True}
GPT_OSS_ROWS = (
    *ATTENTION_ROWS,
    *BIASES,
    TensorRow("blocks/attn/b_o", "layers.{l}.self_attn.o_proj.bias"),
    TensorRow("blocks/attn/sinks", "layers.{l}.self_attn.sinks"),
    TensorRow("blocks/moe/router", "layers.{l}.mlp.router.weight", True),
    TensorRow("blocks/moe/b_router", "layers.{l}.mlp.router.bias"),
    *_fused(f"{EXPERTS}.gate_up_proj", "blocks/moe/w_gate", "blocks/moe/w_up", **IN_TURN),
    *_fused(f"{EXPERTS}.gate_up_proj_bias", "blocks/moe/b_gate", "blocks/moe/b_up", **IN_TURN),
    TensorRow("blocks/moe/w_down", f"{EXPERTS}.down_proj"),
    TensorRow("blocks/moe/b_down", f"{EXPERTS}.down_proj_bias"),
    *HEAD_ROWS,
)
DENSE = "blocks_dense/norm_1/scale"  # its layers come before those with experts


def _deepseek_rows(*experts: TensorRow) -> tuple[TensorRow, ...]:
    """The rows of DeepSeek-V3 with those of its experts."""

    def stack(name: str, prior_leaf: str, *rows: tuple[str, str, bool]) -> list[TensorRow]:
        attention = [
            *((f"attn/w_{n}", f"self_attn.{n}_proj.weight", True) for n in ("q", "q_a", "q_b", "kv_b", "o")),
            ("attn/w_kv_a", "self_attn.kv_a_proj_with_mqa.weight", True),
            *((f"attn/norm_{n}/scale", f"self_attn.{n}_a_layernorm.weight", False) for n in ("q", "kv")),
            ("norm_1/scale", "input_layernorm.weight", False),
            ("norm_2/scale", "post_attention_layernorm.weight", False),
        ]
        all_rows = (*attention, *rows)
        return [
            TensorRow(f"{name}/{leaf}", f"layers.{{l}}.{pattern}", turned, prior_leaf=prior_leaf)
            for leaf, pattern, turned in all_rows
        ]

    def gated(prefix: str, suffix: str) -> list[tuple[str, str, bool]]:
        return [(f"{prefix}/w_{n}", f"mlp{suffix}.{n}_proj.weight", True) for n in ("gate", "up", "down")]

    routed = [("moe/router", "mlp.gate.weight", True), ("moe/bias", "mlp.gate.e_score_correction_bias", False)]
    return (
        TensorRow("embed/tokens", "embed_tokens.weight"),
        *stack("blocks_dense", "", *gated("mlp", "")),
        *stack("blocks_experts", DENSE, *routed, *gated("shared", ".shared_experts")),
        *experts,
        *HEAD_ROWS,
    )


def _experts(pattern: str, *names: str) -> tuple[TensorRow, ...]:
    expert_leaves = (f"blocks_experts/moe/w_{name}" for name in names)
    return _fused(f"layers.{{l}}.mlp.experts.{pattern}", *expert_leaves, prior_leaf=DENSE)


DEEPSEEK_ROWS = _deepseek_rows(*(row for n in ("gate", "up", "down") for row in _experts(f"{{e}}.{n}_proj.weight", n)))
DEEPSEEK_FUSED_ROWS = _deepseek_rows(*_experts("gate_up_proj", "gate", "up"), *_experts("down_proj", "down"))


def row_tensors(row: TensorRow, leaves: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name of theirs without prefix, index into our leaf) of every tensor of a row."""
    letters = [letter for letter in "le" if f"{{{letter}}}" in row.pattern]
    first = leaves[row.prior_leaf].shape[0] if row.prior_leaf in leaves else 0
    for index in itertools.product(*(range(n) for n in leaves[row.leaf].shape[: len(letters)])):
        yield row.pattern.format(**dict(zip(letters, (first + index[0], *index[1:]) if index else ()))), index


def tensor_shape(row: TensorRow, leaves: Mapping[str, Any]) -> list[int]:
    """The shape of the tensors of a row. leaves: ours, by name."""
    shape = [*leaves[row.leaf].shape[row.pattern.count("{") : -1], columns(row, leaves)[-1]]
    return [*shape[:-2], shape[-1], shape[-2]] if row.transposed else shape


def columns(row: TensorRow, leaves: Mapping[str, Any]) -> list[int]:
    """[0, the end of each part of a row's tensor along the last dim]. leaves: ours, by name."""
    sizes = (leaves[name].shape[-1] for name in row.fused_leaves or (row.leaf,))
    return [0, *itertools.accumulate(sizes)]


def column_slice(row: TensorRow, leaves: Mapping[str, Any]) -> slice:
    """The columns of a row's leaf in its tensor. leaves: ours, by name."""
    index, ends = row.fused_leaves.index(row.leaf) if row.fused_leaves else 0, columns(row, leaves)
    return slice(index, ends[-1], len(row.fused_leaves)) if row.in_turn else slice(ends[index], ends[index + 1])

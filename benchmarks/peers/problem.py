"""What every contender is given: one model configuration, the weights, the batches, the optimizer's settings."""

from __future__ import annotations

import dataclasses

import numpy as np

LR, BETA_1, BETA_2, EPS, WEIGHT_DECAY = 3e-4, 0.9, 0.95, 1e-8, 0.1  # AdamW, decay on every leaf, constant rate
CHUNKS = 2  # the stages of a rank in schedules that take several


@dataclasses.dataclass(frozen=True)
class Config:
    """A llama with grouped-query attention, SwiGLU and an untied head; `max_len` is the sequence length T."""

    vocab_size: int
    d_model: int = 512
    n_layers: int = 8
    n_heads: int = 8
    n_kv_heads: int = 4
    d_ff: int = 1408
    max_len: int = 512
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads


CONFIGS = {
    "small-v256": Config(vocab_size=256),
    "small-v32000": Config(vocab_size=32000),
    "middle": Config(vocab_size=256, d_model=256, d_ff=704, max_len=256),
    "tiny": Config(
        vocab_size=100, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=96, max_len=16
    ),  # a check, not a measure
}


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """{leaf name: shape} of fzero's llama; w is used as x @ w, except head/w (and embed/tokens), which are [V, D]."""
    c, L, D = config, config.n_layers, config.d_model
    HK, GK = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
    return {
        "embed/tokens": (c.vocab_size, D),
        "blocks/norm_1/scale": (L, D),
        "blocks/attn/w_q": (L, D, HK),
        "blocks/attn/w_k": (L, D, GK),
        "blocks/attn/w_v": (L, D, GK),
        "blocks/attn/w_o": (L, HK, D),
        "blocks/norm_2/scale": (L, D),
        "blocks/mlp/w_gate": (L, D, c.d_ff),
        "blocks/mlp/w_up": (L, D, c.d_ff),
        "blocks/mlp/w_down": (L, c.d_ff, D),
        "head/norm/scale": (D,),
        "head/w": (c.vocab_size, D),
    }


def weights(config: Config, seed: int) -> dict[str, np.ndarray]:
    """{leaf name: float32 array}: matrices normal with std fan_in^-1/2, norm scales around 1, embeddings of std 1.

    Larger than a training initialisation on purpose: attention is then far from uniform, so that a wrong rotation, head
    grouping or norm moves the first loss well beyond the tolerance.
    """
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in shapes(config).items():
        draw = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("scale"):
            out[name] = 1 + np.float32(0.1) * draw
        elif name == "embed/tokens":
            out[name] = draw
        else:
            fan_in = shape[-1] if name == "head/w" else shape[-2]
            out[name] = draw * np.float32(fan_in**-0.5)
    return out


def batch_at(config: Config, batch_size: int, seed: int, step: int) -> dict[str, np.ndarray]:
    """{"tokens", "targets"}: int64 [B, T] of batch number `step`; targets are the tokens one place on."""
    rng = np.random.default_rng([seed, step])
    rows = rng.integers(0, config.vocab_size, (batch_size, config.max_len + 1), dtype=np.int64)
    return {"tokens": rows[:, :-1].copy(), "targets": rows[:, 1:].copy()}


def rows_of_rank(batch: dict[str, np.ndarray], rank: int, ranks: int) -> dict[str, np.ndarray]:
    """The rank's part of a batch: B/ranks consecutive rows; ValueError where B does not divide."""
    rows = len(batch["tokens"])
    if rows % ranks:
        raise ValueError(f"a batch of {rows} sequences does not divide among {ranks} ranks; use a multiple of {ranks}")
    return {name: x[rank * rows // ranks : (rank + 1) * rows // ranks] for name, x in batch.items()}


def rope_table(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), float32 [T, K/2], of the half layout: dim k is rotated together with dim k + K/2."""
    K = config.d_head
    angle = np.outer(np.arange(config.max_len), config.rope_theta ** (-np.arange(0, K, 2) / K))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def reject_unknown_switches(contender: str, switches: frozenset[str], known: frozenset[str]) -> None:
    """Nothing; raises ValueError where a contender is asked for a switch it does not have."""
    if switches - known:
        raise ValueError(f"{contender} has no switch {sorted(switches - known)}; it has {sorted(known) or 'none'}")

"""The torch peers: a plain nn.Module llama with fused AdamW, eager or under torch.compile.

fp32, or bf16 as people do it: fp32 parameters under `torch.autocast`; with the switch `all-bf16` parameters, gradients
and AdamW's states are bf16 (`model.to(torch.bfloat16)`). The worker sets the
switch `onednn`, for the whole process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peers import problem

SWITCHES = frozenset({"onednn", "all-bf16"})


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, T, K] rotated by position; half layout."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, c: problem.Config):
        super().__init__()
        self.heads, self.kv_heads, self.d_head = c.n_heads, c.n_kv_heads, c.d_head
        self.norm_1 = nn.RMSNorm(c.d_model, eps=c.norm_eps)
        self.w_q = nn.Linear(c.d_model, c.n_heads * c.d_head, bias=False)
        self.w_k = nn.Linear(c.d_model, c.n_kv_heads * c.d_head, bias=False)
        self.w_v = nn.Linear(c.d_model, c.n_kv_heads * c.d_head, bias=False)
        self.w_o = nn.Linear(c.n_heads * c.d_head, c.d_model, bias=False)
        self.norm_2 = nn.RMSNorm(c.d_model, eps=c.norm_eps)
        self.w_gate = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.w_up = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.w_down = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        h = self.norm_1(x)
        q = self.w_q(h).view(B, T, self.heads, self.d_head).transpose(1, 2)
        k = self.w_k(h).view(B, T, self.kv_heads, self.d_head).transpose(1, 2)
        v = self.w_v(h).view(B, T, self.kv_heads, self.d_head).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.w_o(a.transpose(1, 2).reshape(B, T, -1))
        h = self.norm_2(x)
        return x + self.w_down(F.silu(self.w_gate(h)) * self.w_up(h))


class Llama(nn.Module):
    def __init__(self, c: problem.Config):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layers))
        self.norm = nn.RMSNorm(c.d_model, eps=c.norm_eps)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        cos, sin = problem.rope_table(c)
        self.register_buffer("cos", torch.tensor(cos), persistent=False)
        self.register_buffer("sin", torch.tensor(sin), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def state_dict(weights: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """The weights under the module's names: one entry a layer, matrices turned to nn.Linear's [out, in]."""
    out = {
        "embed.weight": weights["embed/tokens"],
        "norm.weight": weights["head/norm/scale"],
        "head.weight": weights["head/w"],
    }
    for name, stacked in weights.items():
        if name.startswith("blocks/"):
            leaf = name.removesuffix("/scale").rsplit("/", 1)[1]
            for layer, w in enumerate(stacked):
                out[f"blocks.{layer}.{leaf}.weight"] = w.T if w.ndim == 2 else w
    return {name: torch.from_numpy(w) for name, w in out.items()}  # load_state_dict copies


def build(weights: dict[str, np.ndarray], config: problem.Config) -> Llama:
    """The module with these weights, in fp32."""
    model = Llama(config)
    model.load_state_dict(state_dict(weights))
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Fused AdamW over all parameters, with the settings of the problem."""
    betas = (problem.BETA_1, problem.BETA_2)
    return torch.optim.AdamW(model.parameters(), problem.LR, betas, problem.EPS, problem.WEIGHT_DECAY, fused=True)


def training_step(
    forward: Callable, optimizer: torch.optim.Optimizer, autocast: bool
) -> Callable[[dict[str, np.ndarray]], float]:
    """batch -> loss before the update; `forward(tokens, targets)` is the loss."""

    def step(batch: dict[str, np.ndarray]) -> float:
        tokens, targets = torch.from_numpy(batch["tokens"]), torch.from_numpy(batch["targets"])
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = forward(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def make(
    weights: dict[str, np.ndarray], config: problem.Config, dtype: str, switches: frozenset[str], *, compiled: bool
) -> Callable[[dict[str, np.ndarray]], float]:
    """A training step of the module from these weights: batch -> loss before the update."""
    problem.reject_unknown_switches("compile" if compiled else "eager", switches, SWITCHES)
    if "all-bf16" in switches and dtype != "bf16":
        raise ValueError(f"the switch all-bf16 needs --dtype bf16, not {dtype}")
    model = build(weights, config)
    if "all-bf16" in switches:
        model.to(torch.bfloat16)
    optimizer = adamw(model)
    forward = torch.compile(model) if compiled else model
    autocast = dtype == "bf16" and "all-bf16" not in switches

    return training_step(forward, optimizer, autocast)

"""GPT-2 as people write it: an nn.Module with scaled_dot_product_attention, LayerNorm, tanh GELU and a tied head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fzero.models import GPT2Config


class Block(nn.Module):
    def __init__(self, c: GPT2Config):
        super().__init__()
        self.heads = c.n_heads
        self.ln_1, self.ln_2 = nn.LayerNorm(c.d_model, c.norm_eps), nn.LayerNorm(c.d_model, c.norm_eps)
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln_1(x)).split(D, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """`forward(tokens, targets)` is the mean cross entropy."""

    def __init__(self, c: GPT2Config):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layers))
        self.norm = nn.LayerNorm(c.d_model, c.norm_eps)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=c.init_std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy((self.norm(x) @ self.tokens.weight.T).float().flatten(0, 1), targets.flatten())

"""Modules as people write them, for the tests of from_module."""

import torch
import torch.nn.functional as F
from torch import nn

V, D, HEADS, L, T, ROWS = 13, 8, 2, 3, 6, 8


class Layer(nn.Module):
    """A layer that is given a rotary table and a learned bias, as all layers are, and has a buffer of its own."""

    def __init__(self, number, dropout):
        super().__init__()
        self.number = number  # counts the layers, and is used nowhere
        self.norm, self.drop = nn.LayerNorm(D), nn.Dropout(dropout)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in "qkvo")
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.register_buffer("weight", torch.tensor(0.5 + number))

    def forward(self, x, cos, *, bias):
        b, t, _ = x.shape
        q, k, v = (f(self.norm(x)).view(b, t, -1, D // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = (q * cos) @ (k * cos).transpose(-1, -2) + bias
        h = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1)
        x = x + self.weight * self.drop(self.o(h))
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Transformer(nn.Module):
    """Tied embedding and head, registered in an order that says nothing; a frozen leaf; a buffer for all layers."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.head = nn.Linear(D, V, bias=False)
        self.norm, self.drop = nn.LayerNorm(D), nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(i, dropout) for i in range(L))
        self.tokens = nn.Embedding(V, D)
        self.head.weight = self.tokens.weight
        self.offset = nn.Parameter(0.1 * torch.randn(D), requires_grad=False)
        self.bias = nn.Parameter(0.3 * torch.randn(1, 16, 16))
        self.register_buffer("cos", torch.cos(torch.arange(16.0)[:, None] * torch.arange(1.0, D // HEADS + 1)))

    def forward(self, tokens):
        t = tokens.shape[1]
        x = self.drop(self.tokens(tokens) + self.offset)
        bias = self.bias[:, :t, :t] + torch.full((t, t), -1e9, dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, self.cos[:t], bias=bias)
        return self.head(self.norm(x))


def token_loss(call, batch):
    nats = F.cross_entropy(call(batch["tokens"]).flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    return nats, batch["targets"].numel()


def tokens_of(seed):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, V, (ROWS, T), generator=g) for name in ("tokens", "targets")}


def square_loss(call, batch):
    return (call(batch["x"]) - batch["y"]).square().sum(), len(batch["x"])


def points_of(seed):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(ROWS, size, generator=g, dtype=torch.float64) for name, size in (("x", 4), ("y", 1))}


def sequential(dropout=0.0):
    middle = (nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Dropout(dropout)) for _ in range(L))
    return nn.Sequential(nn.Linear(4, D), *middle, nn.Linear(D, 1))


class Drawing(nn.Module):
    """A layer that draws by functions of torch, in and outside of modules of its own."""

    def __init__(self, number, rate):
        super().__init__()
        self.rate, self.up, self.down = rate, nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.heads = nn.MultiheadAttention(D, HEADS, dropout=rate, batch_first=True)

    def forward(self, x):
        rate = self.rate if self.training else 0.0
        q = x.view(len(x), -1, HEADS, D // HEADS).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q, dropout_p=rate, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(h, rate, self.training) + self.heads(x, x, x, need_weights=False)[0] + self.heads(x, x, x)[0]
        return x + F.dropout(self.down(F.gelu(self.up(x))), rate, self.training)


class Noisy(nn.Module):
    """Drawing layers, and noise outside of them in training."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.tokens, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.layers = nn.ModuleList(Drawing(i, dropout) for i in range(L))
        self.noise = 0.1 * dropout

    def forward(self, tokens):
        x = self.tokens(tokens)
        if self.training and self.noise:
            x = F.dropout1d(x + self.noise * torch.randn_like(x), self.noise)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Branching(nn.Module):
    """Its code needs a value, so that it cannot be cut; its buffer is no parameter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("least", torch.tensor(0.0))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        if float(x.detach().square().sum()) < float(self.least):
            x = -x
        return x[:, :1]


KINDS = {
    "transformer": (Transformer, token_loss, tokens_of),
    "noisy": (Noisy, token_loss, tokens_of),
    "sequential": (sequential, square_loss, points_of),
    "branching": (Branching, square_loss, points_of),
}


def made(kind, **options):
    """(the module in float64, its loss, its batches by seed), with the same weights each time."""
    make, loss, batch_of = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = make(**options)
    return module.double(), loss, batch_of

"""GPT-2 in JAX with optax, as JAX programs do bf16: float32 parameters, cast at the head of the loss; one jitted step
with donated state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fzero.models import GPT2Config


def draw(c: GPT2Config) -> dict[str, jax.Array]:
    """Parameters: normal numbers, ones and zeros."""
    rng, L, D, F = np.random.default_rng(0), c.n_layers, c.d_model, c.d_ff
    shapes = {"tokens": (c.vocab_size, D), "positions": (c.max_len, D)}
    shapes |= {"qkv": (L, D, 3 * D), "out": (L, D, D), "up": (L, D, F), "down": (L, F, D)}
    found = {name: c.init_std * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    found |= {f"{name}_b": np.zeros(found[name].shape[::2], np.float32) for name in ("qkv", "out", "up", "down")}
    for name, shape in (("ln_1", (L, D)), ("ln_2", (L, D)), ("ln", (D,))):
        found |= {name: np.ones(shape, np.float32), f"{name}_b": np.zeros(shape, np.float32)}
    return {name: jnp.asarray(x) for name, x in found.items()}


def layer_norm(x: jax.Array, scale: jax.Array, shift: jax.Array, eps: float) -> jax.Array:
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + eps)
    return y.astype(x.dtype) * scale + shift


def loss_fn(params: dict[str, jax.Array], tokens: jax.Array, targets: jax.Array, c: GPT2Config) -> jax.Array:
    """The mean cross entropy, computed in bfloat16."""
    params = {name: p.astype(jnp.bfloat16) for name, p in params.items()}
    B, T = tokens.shape
    form = "cudnn" if jax.default_backend() == "gpu" else None

    def block(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        qkv = layer_norm(x, p["ln_1"], p["ln_1_b"], c.norm_eps) @ p["qkv"] + p["qkv_b"]
        q, k, v = (part.reshape(B, T, c.n_heads, -1) for part in jnp.split(qkv, 3, -1))
        a = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=form)
        x = x + a.reshape(B, T, -1) @ p["out"] + p["out_b"]
        h = jax.nn.gelu(layer_norm(x, p["ln_2"], p["ln_2_b"], c.norm_eps) @ p["up"] + p["up_b"], approximate=True)
        return x + h @ p["down"] + p["down_b"], None

    stacked = [name for name in params if params[name].ndim > 1 and name not in ("tokens", "positions")]
    x = params["tokens"][tokens] + params["positions"][:T]
    x, _ = jax.lax.scan(block, x, {name: params[name] for name in stacked})
    logits = layer_norm(x, params["ln"], params["ln_b"], c.norm_eps) @ params["tokens"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


def make(c: GPT2Config, tokens: np.ndarray, targets: np.ndarray) -> Callable[[], float]:
    """A training step on one batch: its loss before the update."""
    tx = optax.adamw(3e-4, 0.9, 0.95, 1e-8, weight_decay=0.1)

    def update(params: Any, opt_state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens, targets, c)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, step = draw(c), jax.jit(update, donate_argnums=(0, 1))
    opt_state, x, y = tx.init(params), jnp.asarray(tokens, jnp.int32), jnp.asarray(targets, jnp.int32)

    def one() -> float:
        nonlocal params, opt_state
        params, opt_state, loss = step(params, opt_state, x, y)
        return float(jax.block_until_ready(loss))

    return one

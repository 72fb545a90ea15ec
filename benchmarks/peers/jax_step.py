"""The JAX peer: a pure llama loss, optax.adamw, one jitted step with donated state.

bf16 as JAX programs do it: fp32 parameters, cast to bf16 at the head of the loss; norms and the loss are taken in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from peers import problem


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [B, T, heads, K] rotated by position; half layout."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def loss_fn(
    params: dict[str, jax.Array],
    batch: dict[str, jax.Array],
    c: problem.Config,
    dtype: Any,
    pin: Callable = lambda x: x,
) -> jax.Array:
    """The mean loss; `pin` is applied to the activations between blocks, for a sharding constraint."""
    params = {name: p.astype(dtype) for name, p in params.items()}
    B, T = batch["tokens"].shape
    cos, sin = problem.rope_table(c)

    def block(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        h = rms_norm(x, p["blocks/norm_1/scale"], c.norm_eps)
        q = rotate((h @ p["blocks/attn/w_q"]).reshape(B, T, c.n_heads, c.d_head), cos, sin)
        k = rotate((h @ p["blocks/attn/w_k"]).reshape(B, T, c.n_kv_heads, c.d_head), cos, sin)
        v = (h @ p["blocks/attn/w_v"]).reshape(B, T, c.n_kv_heads, c.d_head)
        a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + a.reshape(B, T, -1) @ p["blocks/attn/w_o"]
        h = rms_norm(x, p["blocks/norm_2/scale"], c.norm_eps)
        x = x + (jax.nn.silu(h @ p["blocks/mlp/w_gate"]) * (h @ p["blocks/mlp/w_up"])) @ p["blocks/mlp/w_down"]
        return pin(x), None

    x = pin(params["embed/tokens"][batch["tokens"]])
    blocks = {name: p for name, p in params.items() if name.startswith("blocks/")}
    x, _ = jax.lax.scan(block, x, blocks, unroll=True)  # faster than rolled on the CPU, at nearly the same memory
    logits = rms_norm(x, params["head/norm/scale"], c.norm_eps) @ params["head/w"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["targets"]).mean()


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(problem.LR, problem.BETA_1, problem.BETA_2, problem.EPS, weight_decay=problem.WEIGHT_DECAY)


def update_fn(
    tx: optax.GradientTransformation, config: problem.Config, dtype: str, pin: Callable = lambda x: x
) -> Callable:
    """update(params, opt_state, batch) -> (params, opt_state, loss), pure."""
    compute_dtype = {"fp32": jnp.float32, "bf16": jnp.bfloat16}[dtype]

    def update(params: Any, opt_state: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, config, compute_dtype, pin)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return update


def build(weights: dict[str, np.ndarray], config: problem.Config, dtype: str) -> tuple[Callable, Any, Any]:
    """(update, params, opt_state): jitted update(params, opt_state, batch) -> (params, opt_state, loss), donated."""
    tx = optimizer()
    params = {name: jnp.array(w) for name, w in weights.items()}
    return jax.jit(update_fn(tx, config, dtype), donate_argnums=(0, 1)), params, tx.init(params)


def as_int32(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: x.astype(np.int32) for name, x in batch.items()}  # JAX's default integer


def make(
    weights: dict[str, np.ndarray], config: problem.Config, dtype: str, switches: frozenset[str]
) -> Callable[[dict[str, np.ndarray]], float]:
    """A training step from these weights: batch -> loss before the update."""
    problem.reject_unknown_switches("jax", switches, frozenset())
    update, params, opt_state = build(weights, config, dtype)

    def step(batch: dict[str, np.ndarray]) -> float:
        nonlocal params, opt_state
        params, opt_state, loss = update(params, opt_state, as_int32(batch))
        jax.block_until_ready(params)
        return float(loss)

    return step


def planned_bytes(
    weights: dict[str, np.ndarray], config: problem.Config, dtype: str, batch: dict[str, np.ndarray]
) -> int:
    """Peak bytes of the step as XLA planned them: arguments + outputs - donated + temporaries."""
    update, params, opt_state = build(weights, config, dtype)
    return bytes_of_plan(update.lower(params, opt_state, as_int32(batch)).compile())


def bytes_of_plan(compiled: jax.stages.Compiled) -> int:
    """Peak bytes on a device of a compiled step, as XLA planned them."""
    plan = compiled.memory_analysis()
    kept = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    return kept + plan.temp_size_in_bytes

"""The JAX peer on N devices of one process: parameters and AdamW's state sharded over them, as FSDP, by jit and
NamedSharding.

A leaf is sharded on its first per-layer dim (dim 1 of `blocks/...`, else dim 0) and the batch on its rows; activations
are pinned to the batch's sharding, so that XLA gathers weights and scatters gradients. Precision as in `jax_step.py`.
The devices are XLA's host platform's (`--xla_force_host_platform_device_count`) and share the process's threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from peers import jax_step, problem


def layout(name: str, leaf: jax.Array, mesh: Mesh) -> NamedSharding:
    """Where the leaf rests; ValueError where its dim does not divide by the devices."""
    if leaf.ndim == 0:
        return NamedSharding(mesh, PartitionSpec())
    dim = 1 if name.startswith("blocks/") else 0
    if leaf.shape[dim] % mesh.size:
        raise ValueError(f"{name}: dim {dim} has size {leaf.shape[dim]}, not divisible by {mesh.size} devices")
    return NamedSharding(mesh, PartitionSpec(*[None] * dim, "dp"))


def build(
    weights: dict[str, np.ndarray], config: problem.Config, dtype: str
) -> tuple[Callable, Any, Any, NamedSharding]:
    """(update, params, opt_state, layout of a batch): as `jax_step.build`, every argument sharded over all devices."""
    mesh = jax.make_mesh((jax.device_count(),), ("dp",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("dp"))
    tx = jax_step.optimizer()

    def layouts(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: layout(getattr(path[-1], "key", ""), leaf, mesh), tree
        )

    params = jax.device_put(weights, layouts(weights))
    where = layouts(jax.eval_shape(tx.init, params))
    opt_state = jax.jit(tx.init, out_shardings=where)(params)
    pin = lambda x: jax.lax.with_sharding_constraint(x, rows)  # noqa: E731
    update = jax.jit(
        jax_step.update_fn(tx, config, dtype, pin),
        donate_argnums=(0, 1),
        out_shardings=(layouts(params), where, NamedSharding(mesh, PartitionSpec())),
    )
    return update, params, opt_state, rows


def make(
    weights: dict[str, np.ndarray], config: problem.Config, dtype: str, switches: frozenset[str]
) -> Callable[[dict[str, np.ndarray]], float]:
    """A training step from these weights: batch -> loss before the update."""
    problem.reject_unknown_switches("jax-fsdp", switches, frozenset())
    update, params, opt_state, rows = build(weights, config, dtype)

    def step(batch: dict[str, np.ndarray]) -> float:
        nonlocal params, opt_state
        params, opt_state, loss = update(params, opt_state, jax.device_put(jax_step.as_int32(batch), rows))
        jax.block_until_ready(params)
        return float(loss)

    return step


def planned_bytes(
    weights: dict[str, np.ndarray], config: problem.Config, dtype: str, batch: dict[str, np.ndarray]
) -> int:
    """Peak bytes of the step on one device, as XLA planned them."""
    update, params, opt_state, rows = build(weights, config, dtype)
    batch = jax.device_put(jax_step.as_int32(batch), rows)
    return jax_step.bytes_of_plan(update.lower(params, opt_state, batch).compile())

"""The disk of a plan, with the memory for transfers to and from it that the plan needs."""

from __future__ import annotations

from fzero.core import pytree
from fzero.core.host_memory import round_to_pages
from fzero.offload.nvme import Nvme
from fzero.sharding import Plan
from fzero.sharding.slices import is_stacked, local_numel

LEAST, MOST = 64 << 20, 512 << 20  # bytes for the units of an update


def disk_of(nvme: Nvme | None, plan: Plan, prefetch: int = 0) -> Nvme | None:
    """The disk of a plan, asked for the buffers of its steps; None if the plan needs none.

    prefetch: the layers read ahead of their use. Raises ValueError for a plan that puts something on a disk where none
    is given.
    """
    specs = (spec for leaf in plan.leaves.values() for spec in (leaf.params, leaf.grads, leaf.opt))
    if nvme is not None:
        nvme.need(buffer_need(plan, prefetch=prefetch), plan.mesh.size)
    elif plan.acts == "nvme" or any(spec.memory == "nvme" for spec in specs):
        raise ValueError(
            "offload: the plan puts something on a disk, and none is given; give init_state and the step the same "
            "nvme=fzero.Nvme(folder)"
        )
    return nvme


def buffer_need(plan: Plan, *, prefetch: int = 0, activation_bytes: int = 0) -> int:
    """The bytes of buffers that a rank's step needs: for parameters ahead of their use, activations, gradients, and the
    update's units.

    prefetch: the layers read ahead of their use. activation_bytes: of the input of a layer that is kept.
    """
    policy = plan.policy
    parts: dict[str, int] = {}
    sums: dict[str, int] = {}
    for name, leaf in plan.leaves.items():
        part, layers = name.split("/")[0], leaf.shape[0] if is_stacked(name) else 1
        for sizes, spec, dtype in ((parts, leaf.params, policy.param), (sums, leaf.grads, policy.accumulate)):
            if spec.memory == "nvme":
                size = local_numel(leaf.shape, spec, plan.sizes) // max(1, layers) * dtype.itemsize
                sizes[part] = sizes.get(part, 0) + round_to_pages(size)
    acts = 4 * round_to_pages(activation_bytes) if plan.acts == "nvme" else 0
    forward = (prefetch + 3) * max(parts.values(), default=0) + 2 * max(sums.values(), default=0) + acts
    total = sum(leaf.numel() for leaf in pytree.leaves(plan.like)) * 4
    return max(forward, min(max(total // 4, LEAST), MOST))

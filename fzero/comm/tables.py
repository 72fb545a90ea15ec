"""Small tables that all ranks fill together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fzero.comm.collectives import all_gather

Mesh = Any  # fzero.sharding.Mesh, which is above


def barrier(mesh: Mesh) -> Callable[[], None]:
    """A function that returns when all ranks of the mesh have called it."""

    def wait() -> None:
        token = torch.zeros(1, device="cuda" if mesh.device_mesh is not None and mesh.device_mesh.device_type == "cuda" else "cpu")
        with mesh.ledger.phase("commit"):
            for axis in mesh.axes:
                token = all_gather(token, axis, 0, leaf="commit")[:1]
        float(token)  # a GPU's collective has come this far

    return wait

"""The end of a save: what the ranks report to rank 0, and the manifest with which a checkpoint is complete."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fzero.checkpoint import manifest
from fzero.checkpoint.directory import step_folder
from fzero.checkpoint.manifest import Folder, Leaf, join
from fzero.checkpoint.save_state import Save, error_line
from fzero.checkpoint.zarr import write_descriptions
from fzero.core.storage import is_url, sync_folder
from fzero.sharding import Mesh


class Reports:
    """What the ranks of a mesh tell one another about a save, as JSON in the mesh's store."""

    def __init__(self, mesh: Mesh) -> None:
        self.rank = mesh.rank
        store: Any = mesh.store  # torch tells a type checker of no `clone`
        # The mesh's own connection may be blocked by a wait.
        self.store: Any = None if store is None else store.clone()

    def send(self, key: str, report: dict[str, Any]) -> None:
        """Tell rank 0 this rank's report; nothing on rank 0 itself."""
        if self.store is not None and self.rank:
            self.store.set(key, json.dumps(report))

    def receive(self, key: str) -> dict[str, Any]:
        """Wait for the report of that key."""
        pause = 0.001
        while not self.store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return json.loads(self.store.get(key))

    def broadcast(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of `make()` on rank 0, or {"error": ...} if it raised an error, on every rank."""
        if self.rank:
            return self.receive(key)
        try:
            result = make()
        except Exception as error:
            result = {"error": error_line(error)}
        if self.store is not None:
            self.store.set(key, json.dumps(result))
        return result


def complete(
    checkpoint_dir: Folder, save: Save, reports: Sequence[dict[str, Any]], mesh: Mesh, pool: ThreadPoolExecutor
) -> None:
    """Write the zarr metadata and the manifest of a save whose parts are all written.

    reports: of each rank, {leaf: {part: [checksum, digest]}}.
    """
    path, leaves = step_folder(checkpoint_dir, save.step), {}
    for name, (mine, spec) in save.layouts.items():
        layout = mine.layout
        found = {int(number): value for report in reports for number, value in report.get(name, {}).items()}
        assert len(found) == len(layout.parts()), f"{name}: {len(found)} parts of {len(layout.parts())} were written"
        digest = sum(value for _, value in found.values()) % (1 << 64)
        leaves[name] = Leaf(layout, str(spec), f"{digest:016x}", [found[i][0] for i in range(len(found))])
    write_descriptions(join(path, save.arrays), leaves, pool)
    sizes = {axis.name: axis.size for axis in mesh.axes if axis.size > 1}
    manifest.write_manifest(path, save.arrays, leaves, step=save.step, config=save.config, mesh=sizes)
    if not is_url(checkpoint_dir):
        sync_folder(Path(checkpoint_dir))

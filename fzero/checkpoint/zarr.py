"""zarr metadata: a zarr.json for each leaf of a checkpoint and for each group that contains leaves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from fzero.checkpoint.layout import array_json, group_json
from fzero.checkpoint.manifest import Folder, Leaf, join
from fzero.core.files import make_folder, writing
from fzero.core.storage import is_url, sync_file_system, write_text


def zarr_texts(leaves: dict[str, Leaf]) -> dict[str, str]:
    """{name: text of its zarr.json} of each leaf and of each group that contains leaves; the outermost
    group is "", which is the leaf itself if the tree is one leaf."""
    texts = {name: array_json(leaf.layout, {"spec": leaf.spec, "digest": leaf.digest}) for name, leaf in leaves.items()}
    groups = {"/".join(parts[:n]) for name in leaves for parts in [name.split("/")] for n in range(len(parts))} | {""}
    return texts | dict.fromkeys(groups - texts.keys(), group_json())


def write_descriptions(arrays: Folder, leaves: dict[str, Leaf], pool: ThreadPoolExecutor) -> None:
    """Write the zarr.json of every leaf and group, durably, and remove files that belong to none of them."""
    texts = zarr_texts(leaves)
    if is_url(arrays):
        places = {name: join(arrays, name) for name in texts}
        for task in [pool.submit(write_text, places[name], "zarr.json", text) for name, text in texts.items()]:
            task.result()
        return

    above, own = Path(arrays).parent, Path(arrays).name

    def put(name: str) -> None:
        folder = make_folder(above, own, *filter(None, name.split("/")))
        with writing(folder / "zarr.json", "replace") as f:
            f.write(texts[name].encode())

    run_all(pool, put, texts)
    keep = {Path(arrays, name, leaf.layout.key(part)) for name, leaf in leaves.items() for part in leaf.layout.parts()}
    keep |= {Path(arrays, name, "zarr.json") for name in texts}
    for folder, _, files in os.walk(arrays, topdown=False):
        for file in files:
            if Path(folder, file) not in keep:
                Path(folder, file).unlink()  # left over from the removed checkpoint that had these files
        if not os.listdir(folder):
            os.rmdir(folder)
    sync_file_system(Path(arrays))


def run_all(pool: ThreadPoolExecutor, fn: Callable[[Any], None], among: Iterable[Any]) -> None:
    """Call `fn` with each by the threads of `pool`; after all calls have ended, raise the first error.

    So no call still creates files when the caller removes them.
    """
    tasks = [pool.submit(fn, one) for one in among]
    wait(tasks)
    for task in tasks:
        task.result()

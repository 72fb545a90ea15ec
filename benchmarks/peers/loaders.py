"""Rows a second of another system's loader, for benchmarks/loaders.py: `python loaders.py SYSTEM DO FOLDER ...`.

`write FOLDER TOKENS T` makes FOLDER/SYSTEM of TOKENS, a file of uint16 tokens, as the system wants them: rows of T + 1.
`read FOLDER B STEPS WORKERS` reads STEPS shuffled batches of B rows, after one that is not counted, and prints how many
rows a second that were, and the sum of the tokens of an epoch's part, so that nothing is left unread.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import time
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


def rows_of(tokens: str, length: int) -> Iterable[np.ndarray]:
    """The rows of a file of tokens."""
    held = np.memmap(tokens, np.uint16, "r")
    for i in range(len(held) // length):
        yield np.array(held[i * length : (i + 1) * length])


def streaming_library() -> Any:
    """MosaicML streaming, which imports torchvision for its sets of pictures: without one an empty module serves."""
    if importlib.util.find_spec("torchvision") is None:
        names = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")
        modules = {name: types.ModuleType(name) for name in names}
        modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
        modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]
        for name, module in modules.items():
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules.update(modules)
    return importlib.import_module("streaming")


def write_streaming(out: Path, tokens: str, length: int) -> None:
    """MosaicML streaming's shards, a sample each row."""
    with streaming_library().MDSWriter(out=str(out), columns={"tokens": f"ndarray:uint16:{length}"}) as writer:
        for row in rows_of(tokens, length):
            writer.write({"tokens": row})


def read_streaming(out: Path, batch: int, workers: int) -> Any:
    """Its StreamingDataset, shuffled, by torch's DataLoader."""
    from torch.utils.data import DataLoader

    rows = streaming_library().StreamingDataset(local=str(out), shuffle=True, batch_size=batch)
    return (one["tokens"] for one in DataLoader(rows, batch_size=batch, num_workers=workers))


def some_rows(part: tuple[str, int, int, int]) -> Iterable[Any]:
    """What `litdata.optimize` writes of a part of the file: (file, T + 1, first row, rows)."""
    import torch

    tokens, length, first, count = part
    held = np.memmap(tokens, np.uint16, "r")
    for i in range(first, first + count):
        yield torch.from_numpy(held[i * length : (i + 1) * length].astype(np.int32))


def write_litdata(out: Path, tokens: str, length: int) -> None:
    """litdata's chunks of tokens."""
    import litdata

    rows = len(np.memmap(tokens, np.uint16, "r")) // length
    litdata.optimize(
        fn=some_rows,
        inputs=[(tokens, length, 0, rows)],
        output_dir=str(out),
        chunk_bytes="64MB",
        num_workers=1,
        item_loader=litdata.TokensLoader(block_size=length),
    )


def read_litdata(out: Path, batch: int, workers: int) -> Any:
    """Its StreamingDataset of tokens, shuffled, by its StreamingDataLoader."""
    import litdata

    length = int((out / "length").read_text())
    rows = litdata.StreamingDataset(
        str(out), shuffle=True, item_loader=litdata.TokensLoader(block_size=length), drop_last=True
    )
    return iter(litdata.StreamingDataLoader(rows, batch_size=batch, num_workers=workers, drop_last=True))


def main(system: str, do: str, folder: str, *rest: str) -> None:
    out = Path(folder) / system
    if do == "write":
        tokens, length = rest[0], int(rest[1]) + 1
        globals()[f"write_{system}"](out, tokens, length)
        (out / "length").write_text(str(length))
        return
    import torch

    torch.set_num_threads(1)
    batch, steps, workers = map(int, rest)
    batches = globals()[f"read_{system}"](out, batch, workers)
    total, begun = 0, 0.0
    for i, tokens in enumerate(batches):
        if not i:
            begun = time.perf_counter()
            continue
        total += int(tokens[:, 0].sum())
        if i == steps:
            break
    seconds = time.perf_counter() - begun
    print("rows_per_s", i * batch / seconds, "sum", total)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Checkpoints of a state tree: whole or not there, checked leaf by leaf when read.

    RUN/checkpoints/
        step-00000020/
            state-0.safetensors     the leaves under their names; any safetensors reader opens it
            manifest.json           step, config, versions, and of every leaf shape, dtype, place in the file and SHA-256

A checkpoint is there when its manifest is, and the manifest is put in place by one rename, after all it speaks of is on the disk. So a
save that is killed leaves what was there before, and some files that no manifest names, which the next save removes. A folder has one
writer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

import fzero
from fzero import pytree
from fzero.pytree import Tree

FORMAT, VERSION = "fzero-checkpoint", 1
MANIFEST, PARTIAL = "manifest.json", "manifest.json.partial"
CHUNK_BYTES = 1 << 22

# The names that the safetensors format has for dtypes.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Entry = tuple[torch.dtype, tuple[int, ...], Callable[[], Tensor]]  # dtype, shape, and a function that gives the tensor


# ---- writing ----


def save(folder: str | Path, state: Tree, *, step: int, config: dict | None = None, keep_last: int | None = None) -> Path:
    """The path of the checkpoint `folder`/step-XXXXXXXX, written from `state` (any tree of tensors) and complete on return.

    config: anything JSON can hold, kept in the manifest. A checkpoint of the same step is replaced. keep_last: when the new checkpoint
    is in place, older ones beyond so many are removed; ones of later steps stay.
    Raises ValueError naming the leaf that is not a tensor or has a dtype that cannot be stored, and OSError where the disk fails; what
    was there before is then as it was.
    """
    entries = _entries(state)
    if type(step) is not int or step < 0:
        raise ValueError(f"checkpoint: step is {step!r}; it must be an int of at least 0")
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"checkpoint: keep_last is {keep_last}; it must be at least 1, or None to keep all")
    try:
        config = json.loads(json.dumps(config, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"checkpoint: config is not JSON: {error}") from None
    home = Path(folder)
    if home.exists() and not home.is_dir():
        raise ValueError(f"{home}: is not a folder; give a folder to save checkpoints in")
    home.mkdir(parents=True, exist_ok=True)
    target = home / f"step-{step:08d}"
    for place in _places(home).values():
        _clean(place)
    target.mkdir(exist_ok=True)
    data = next(target / f"state-{i}.safetensors" for i in count() if not (target / f"state-{i}.safetensors").exists())
    try:
        leaves, header = write_safetensors(data, entries)
        body = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "config": config,
            "versions": {"fzero": fzero.__version__, "torch": torch.__version__},
            "files": {data.name: header},
            "leaves": {name: {**leaf, "file": data.name} for name, leaf in leaves.items()},
        }
        partial = target / PARTIAL
        with open(partial, "w", encoding="utf-8") as f:
            json.dump({**body, "sha256": _digest(body)}, f, indent=1)
            _sync_file(f)
        _sync_folder(target)
        os.replace(partial, target / MANIFEST)
    except BaseException:
        _clean(target)  # by the manifest: an interrupt may come after the rename, when the new file is the one it names
        raise
    _sync_folder(target)
    _sync_folder(home)
    _clean(target)
    if keep_last is not None:
        for old in [n for n in steps(home) if n <= step][:-keep_last]:
            (_places(home)[old] / MANIFEST).unlink()
            _clean(_places(home)[old])
    return target


def write_safetensors(path: Path, entries: dict[str, Entry]) -> tuple[dict[str, dict], dict]:
    """({name: shape, dtype, offset, bytes, sha256}, {bytes, header_bytes, header_sha256}) of the safetensors file written to `path`.

    One tensor is asked for at a time, and the file is on the disk on return. `path` must not exist.
    """
    # Wide dtypes first: then every tensor is aligned, which readers that map the file rely on.
    order = sorted(entries, key=lambda name: -entries[name][0].itemsize)
    table, place = {}, 0
    for name in order:
        dtype, shape, _ = entries[name]
        end = place + dtype.itemsize * torch.Size(shape).numel()
        table[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    leaves = {}
    with open(path, "xb") as f:
        f.write(header)
        for name in order:
            dtype, shape, give = entries[name]
            tensor = give()
            assert tensor.dtype == dtype and tuple(tensor.shape) == tuple(shape), name
            begin, end = table[name]["data_offsets"]
            leaves[name] = {
                "shape": list(shape),
                "dtype": _dtype_name(dtype),
                "offset": len(header) + begin,
                "bytes": end - begin,
                "sha256": _write(f, tensor),
            }
        _sync_file(f)
    record = {"bytes": len(header) + place, "header_bytes": len(header), "header_sha256": hashlib.sha256(header).hexdigest()}
    return {name: leaves[name] for name in entries}, record


def _entries(state: Tree) -> dict[str, Entry]:
    named = pytree.named_leaves(state)
    for name, leaf in named.items():
        if not isinstance(leaf, Tensor):
            raise ValueError(f"checkpoint: leaf {name!r} is a {type(leaf).__name__}, not a tensor; use torch.tensor, or () for nothing")
        if leaf.dtype not in DTYPES:
            raise ValueError(f"checkpoint: leaf {name!r} is {leaf.dtype}; a checkpoint holds {', '.join(map(_dtype_name, DTYPES))}")
    return {name: (leaf.dtype, tuple(leaf.shape), lambda leaf=leaf: leaf) for name, leaf in named.items()}


def _write(f: BinaryIO, tensor: Tensor) -> str:
    """The SHA-256 of the bytes of `tensor`, which are written to `f`."""
    view, digest = _bytes(tensor.detach().cpu().contiguous()), hashlib.sha256()
    for start in range(0, len(view), CHUNK_BYTES):
        piece = view[start : start + CHUNK_BYTES]
        digest.update(piece)
        f.write(piece)
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the CPU."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _digest(body: dict) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sync_file(f: Any) -> None:
    f.flush()
    os.fsync(f.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _places(home: Path) -> dict[int, Path]:
    """{step: folder}, sorted: the folders that are named as checkpoints are, with a manifest or without."""
    found = {int(path.name[5:]): path for path in home.iterdir() if re.fullmatch(r"step-(\d{8}|[1-9]\d{8,})", path.name) and path.is_dir()}
    return dict(sorted(found.items()))


def _clean(place: Path) -> None:
    """Remove the files of ours in `place` that its manifest does not name; without a manifest, all of them and then `place`."""
    complete = (place / MANIFEST).is_file()
    try:
        used = manifest(place)["files"] if complete else {}
    except ValueError:
        return  # a damaged manifest: evidence, until the step is saved again
    for path in [place / PARTIAL, *place.glob("state-*.safetensors")]:
        if path.name not in used:
            path.unlink(missing_ok=True)
    if not complete:
        with contextlib.suppress(OSError):  # it holds files of somebody else
            place.rmdir()


# ---- finding ----


def steps(folder: str | Path) -> list[int]:
    """The steps of the complete checkpoints in `folder`, rising; their content is not read. A folder that is not there has none."""
    home = Path(folder)
    return [n for n, place in _places(home).items() if (place / MANIFEST).is_file()] if home.is_dir() else []


def latest(folder: str | Path) -> Path:
    """The complete checkpoint of the highest step in `folder`; raises ValueError where there is none."""
    found = steps(folder)
    if not found:
        raise ValueError(f"{folder}: no checkpoint in it; one is a folder step-XXXXXXXX with a {MANIFEST}")
    return _places(Path(folder))[found[-1]]


def newest_sound(folder: str | Path) -> tuple[Path, list[tuple[Path, str]]]:
    """(the checkpoint of the highest step in `folder` that is sound, the later ones with what is damaged in each).

    Reads them whole. Raises ValueError where there is none, or all are damaged.
    """
    latest(folder)
    damaged: list[tuple[Path, str]] = []
    for step in reversed(steps(folder)):
        path = _places(Path(folder))[step]
        found = verify(path)
        if not found:
            return path, damaged
        damaged.append((path, found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")))
    raise ValueError(f"{folder}: every checkpoint is damaged: {'; '.join(reason for _, reason in damaged)}")


def verify(path: str | Path) -> list[str]:
    """What is damaged in a checkpoint, one line per leaf or file: [] for a sound one. Reads it whole, one leaf in memory at a time."""
    try:
        record = manifest(path)
    except ValueError as error:
        return [str(error)]
    found = []
    for check in (
        *(lambda name=name: _check_file(Path(path), record, name) for name in record["files"]),
        *(lambda name=name: _read(Path(path), record, name) for name in record["leaves"]),
    ):
        try:
            check()
        except ValueError as error:
            found.append(str(error))
    return found


def manifest(path: str | Path) -> dict[str, Any]:
    """The checked manifest of the checkpoint at `path`: step, config, versions, files, and leaves by name.

    Raises ValueError naming the file when it is missing, damaged, or of another format or version.
    """
    file = Path(path) / MANIFEST
    if not file.is_file():
        raise ValueError(f"{file}: no such file; {path} is not a complete checkpoint")
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        digest = body.pop("sha256", None)
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{file}: damaged: not a JSON object ({error})") from None
    if body.get("format") != FORMAT or digest != _digest(body):
        raise ValueError(f"{file}: damaged, or not a manifest of fzero: its checksum does not agree with its content")
    if body["version"] != VERSION:
        raise ValueError(f"{file}: version {body['version']}; this fzero ({fzero.__version__}) reads version {VERSION}")
    return body


# ---- reading ----


def restore(path: str | Path, like: Tree, *, under: str = "") -> Tree:
    """The tree of the checkpoint at `path`, in the containers of `like`, with every leaf checked and on the device of its likeness.

    like: a tree of tensors of which names, shapes and dtypes are compared; they may be on the meta device (then leaves go to the CPU).
    under: take the part of the state below this name only: `restore(path, params, under="params")` gives the weights. The leaves own
    their memory.
    Raises ValueError naming the leaves that are missing, extra or of another shape or dtype, or the leaf and file that are damaged.
    """
    _entries(like)
    record, prefix = manifest(path), f"{under}/" if under else ""
    wanted = {prefix + name: leaf for name, leaf in pytree.named_leaves(like).items()}
    held = {name: leaf for name, leaf in record["leaves"].items() if name.startswith(prefix)}
    _expect(Path(path), wanted, held)
    leaves = _read_all(Path(path), record, list(held))
    for name, leaf in wanted.items():
        if leaf.device.type not in ("meta", "cpu"):
            leaves[name] = leaves[name].to(leaf.device)
    return pytree.from_named({name.removeprefix(prefix): leaf for name, leaf in leaves.items()}, like)


def restore_leaves(path: str | Path, select: Callable[[str], bool]) -> dict[str, Tensor]:
    """`{name: leaf}` of the leaves of the checkpoint at `path` whose name `select` is true of, checked; ValueError where it is of none."""
    record = manifest(path)
    chosen = [name for name in record["leaves"] if select(name)]
    if not chosen:
        raise ValueError(f"{path}: none of its leaves is selected; they are {_some(list(record['leaves']))}")
    return _read_all(Path(path), record, chosen)


def _expect(path: Path, wanted: dict[str, Any], held: dict[str, dict]) -> None:
    missing = [name for name in wanted if name not in held]
    extra = [name for name in held if name not in wanted]
    shapes = [
        f"{name} {held[name]['shape']} (wanted {list(leaf.shape)})"
        for name, leaf in wanted.items()
        if name in held and held[name]["shape"] != list(leaf.shape)
    ]
    dtypes = [
        f"{name} {held[name]['dtype']} (wanted {_dtype_name(leaf.dtype)})"
        for name, leaf in wanted.items()
        if name in held and held[name]["dtype"] != _dtype_name(leaf.dtype)
    ]
    groups = {"missing": missing, "extra": extra, "of another shape": shapes, "of another dtype": dtypes}
    said = [f"{what}: {_some(group)}" for what, group in groups.items() if group]
    if said:
        raise ValueError(f"{path}: the checkpoint's leaves are not those of the tree; {'; '.join(said)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _read_all(path: Path, record: dict, names: list[str]) -> dict[str, Tensor]:
    for file in {record["leaves"][name]["file"] for name in names}:
        _check_file(path, record, file)
    return {name: _read(path, record, name) for name in names}


def _check_file(path: Path, record: dict, name: str) -> None:
    file, wanted = path / name, record["files"][name]
    if not file.is_file():
        raise ValueError(f"{file}: no such file, but the manifest names it")
    have = file.stat().st_size
    # A short file is reported by the leaves it cuts, which is more to the point.
    if have > wanted["bytes"]:
        raise ValueError(f"{file}: damaged: it has {have} bytes, the manifest says {wanted['bytes']}")
    with open(file, "rb") as f:
        if hashlib.sha256(f.read(wanted["header_bytes"])).hexdigest() != wanted["header_sha256"]:
            raise ValueError(f"{file}: damaged: its header does not agree with its checksum")


def _read(path: Path, record: dict, name: str) -> Tensor:
    leaf = record["leaves"][name]
    file = path / leaf["file"]
    tensor = torch.empty(leaf["shape"], dtype=getattr(torch, leaf["dtype"]))
    view, digest = _bytes(tensor), hashlib.sha256()
    if not file.is_file():
        raise ValueError(f"leaf {name} is lost: {file} is not there")
    with open(file, "rb", buffering=0) as f:
        f.seek(leaf["offset"])
        done = 0
        while done < len(view):
            piece = view[done : done + CHUNK_BYTES]
            got = f.readinto(piece)
            if not got:
                raise ValueError(f"leaf {name} is damaged: {file} ends after {done} of its {len(view)} bytes")
            digest.update(piece[:got])
            done += got
    if digest.hexdigest() != leaf["sha256"]:
        raise ValueError(f"leaf {name} is damaged: its bytes in {file} do not agree with the checksum in {MANIFEST}")
    return tensor

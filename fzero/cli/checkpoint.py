"""`fzero ckpt`: list, show, verify, compare and remove checkpoints (fzero/run/runner/checkpoint_*.py)."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import click

from fzero.cli.flags import AS_JSON, Number
from fzero.comm.axes import mesh_text
from fzero.core.config_tables import COUNT, RATE


@click.group()
def ckpt() -> None:
    """List, show, verify, compare and remove checkpoints, in folders and object stores."""


@ckpt.command()
@click.argument("place", metavar="RUN|FOLDER|URL")
@AS_JSON
def ls(place: str, as_json: bool) -> None:
    """List the checkpoints of a run, in a folder or below a URL, complete or not."""
    from fzero.run.runner import checkpoint_list

    listing = checkpoint_list.listing(place)
    if as_json:
        entries = [{**entry._asdict(), "path": str(entry.path)} for entry in listing.entries]
        store = listing.store and listing.store._asdict()
        click.echo(
            json.dumps(
                {"home": str(listing.checkpoint_dir), "entries": entries, "spare": listing.spare, "store": store},
                indent=1,
            )
        )
        return
    if not listing.entries:
        click.echo(f"{listing.checkpoint_dir}: no checkpoints")
    rows = []
    for entry in listing.entries:
        leaves = "-" if entry.leaves is None else f"{entry.leaves:,}"
        mesh = "-" if entry.mesh is None else mesh_text(entry.mesh)
        rows.append(
            [
                f"{entry.step}",
                format_time(entry.written),
                size(entry.size),
                leaves,
                size(entry.nbytes),
                mesh,
                entry.state,
            ]
        )
    if rows:
        click.echo(str(listing.checkpoint_dir))
        echo_table(["step", "written", "on disk", "leaves", "of bytes", "mesh", "state"], rows, right={0, 2, 3, 4})
    for entry in listing.entries:
        if entry.note:
            click.echo(f"step {entry.step}: {entry.note}")
    if listing.spare:
        click.echo(f"{size(listing.spare)} of files in spare/ wait for the next save to write over them")
    if listing.store is not None:
        nvme_store, pinned = listing.store, ", ".join(map(str, listing.store.pinned))
        pinned_text = f", and steps {pinned} kept as checkpoints" if pinned else ""
        last = f"step {nvme_store.step} is complete{pinned_text}" if nvme_store.step is not None else "no complete step"
        click.echo(f"on the disk, {nvme_store.place}: {last}{f' ({nvme_store.note})' if nvme_store.note else ''}")


@ckpt.command()
@click.argument("path", metavar="PATH")
@click.option(
    "--leaf", metavar="REGEX", help="Show only leaves whose name contains a match of this regular expression."
)
@AS_JSON
def show(path: str, leaf: str | None, as_json: bool) -> None:
    """Show the content of a checkpoint; of a run, folder or URL: of its newest one."""
    from fzero.checkpoint.directory import incomplete_lines
    from fzero.run.runner import checkpoint_list

    try:
        pattern = re.compile(leaf or "")
    except re.error as error:
        raise ValueError(f"--leaf {leaf!r}: is no regular expression ({error})") from None
    description = checkpoint_list.describe_checkpoint(path)
    leaves = {name: row for name, row in description.leaves.items() if pattern.search(name)}
    if not leaves and description.leaves:
        raise ValueError(
            f"--leaf {leaf!r}: is found in the name of none of the {len(description.leaves)} leaves, such as "
            f"{next(iter(description.leaves))}"
        )
    for line in incomplete_lines(description.path) if str(description.path) != path.rstrip("/") else ():
        click.echo(line, err=True)
    if as_json:
        click.echo(json.dumps({**description._asdict(), "path": str(description.path), "leaves": leaves}, indent=1))
        return
    versions = ", ".join(f"{name} {version}" for name, version in description.versions.items())
    click.echo(f"{description.path}: step {description.step}, by {versions}, on {mesh_text(description.mesh)}")
    for name, value in description.config.items():
        click.echo(f"  {name} = {json.dumps(value)}" if name else f"  {json.dumps(value)}")
    click.echo()
    rows = [
        [
            name,
            shape(row["shape"]),
            row["dtype"],
            row["spec"],
            f"{row['parts']}",
            shape(row["chunk"]),
            size(row["bytes"]),
            row["digest"],
        ]
        for name, row in leaves.items()
    ]
    echo_table(["leaf", "shape", "dtype", "spec", "parts", "chunk", "bytes", "digest"], rows, right={4, 6})
    click.echo()
    totals = [
        [name, f"{t['leaves']:,}", f"{t['elements']:,}", size(t["bytes"])] for name, t in description.totals.items()
    ]
    grand_total = [sum(t[key] for t in description.totals.values()) for key in ("leaves", "elements", "bytes")]
    totals.append(["all", f"{grand_total[0]:,}", f"{grand_total[1]:,}", size(grand_total[2])])
    echo_table(["", "leaves", "elements", "bytes"], totals, right={1, 2, 3})


@ckpt.command()
@click.argument("path", metavar="PATH")
def verify(path: str) -> int:
    """Read a whole checkpoint, and a state on a disk, and name all damage. The exit code is 1 if there is any."""
    from fzero.run.runner import checkpoint_list

    read = checkpoint_list.verify(path)
    for location, faults in read:
        for line in faults:
            click.echo(line)
        click.echo(f"{location}: {f'damaged: {len(faults)} found' if faults else 'sound'}")
    return 1 if any(faults for _, faults in read) else 0


@ckpt.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--atol",
    type=Number(float, RATE),
    default=0.0,
    help="The largest difference of equal elements. Default: all bits must be equal.",
)
@click.option("--all", "every", is_flag=True, help="Compare all differing leaves, not only the first.")
@AS_JSON
def diff(a: str, b: str, atol: float, every: bool, as_json: bool) -> int:
    """Compare two checkpoints (of a run, folder or URL: its newest). The exit code is 1 if they differ."""
    from fzero.run.runner import checkpoint_diff

    difference = checkpoint_diff.compare(a, b, tolerance=atol, every=every)
    if as_json:
        compared = [
            {**leaf._asdict(), **{k: finite(getattr(leaf, k)) for k in ("largest", "largest_relative")}}
            for leaf in difference.compared
        ]
        for leaf in compared:
            leaf["values"] = leaf["values"] and [finite(value) for value in leaf["values"]]
        value = {
            **difference._asdict(),
            "a": str(difference.a),
            "b": str(difference.b),
            "compared": compared,
            "same": difference.equal,
        }
        click.echo(json.dumps(value, indent=1))
        return 0 if difference.equal else 1
    for folder, names in ((difference.a, difference.only_a), (difference.b, difference.only_b)):
        for name in names:
            click.echo(f"leaf {name}: only in {folder}")
    for line in difference.other:
        click.echo(f"leaf {line}")
    for leaf in difference.compared:
        if leaf.differing or every:
            click.echo(str(leaf))
    unread = len(difference.differing) - len(difference.compared)
    if unread:
        click.echo(f"{unread} more leaves have other digests (--all compares them)")
    if not difference.equal:
        click.echo(f"differ: {difference.a} and {difference.b}")
        return 1
    within = f"within {atol:g}" if difference.differing else "bit for bit"
    click.echo(f"the same {within}: {difference.leaves} leaves of {difference.a} and {difference.b}")
    return 0


@ckpt.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "--step",
    "steps",
    type=Number(int, COUNT),
    multiple=True,
    metavar="N",
    help="A step of the run. Its checkpoint in PATH, a run, folder or URL, is removed. Repeatable.",
)
@click.option("--force", is_flag=True, help="Remove even the last complete checkpoint.")
def rm(paths: tuple[str, ...], steps: tuple[int, ...], force: bool) -> None:
    """Remove checkpoints as a whole, and the folders of interrupted saves."""
    from fzero.run.runner import checkpoint_list

    for line in checkpoint_list.remove(list(paths), list(steps), force=force):
        click.echo(line)


def echo_table(head: list[str], rows: list[list[str]], *, right: set[int]) -> None:
    """Print rows under a head, in columns; `right`: the columns of numbers."""
    from fzero.core.text_parsing import text_table

    for line in text_table(head, rows, text=[i for i in range(len(head)) if i not in right]):
        click.echo(line)


def size(count: int | None) -> str:
    """Format a number of bytes; "-" if unknown."""
    if count is None:
        return "-"
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def format_time(seconds: float | None) -> str:
    """Format a time in the local time zone; "-" if unknown."""
    return "-" if seconds is None else datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def shape(dims: list[int]) -> str:
    """Format a shape, such as 4x32."""
    return "x".join(map(str, dims)) or "-"


def finite(value: Any) -> Any:
    """Convert a number to a JSON value: to text if it is not finite."""
    return (
        str(value) if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))) else value
    )

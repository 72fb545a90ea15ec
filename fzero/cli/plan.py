"""`fzero plan`: what a run needs and how long it takes, before it runs; plans side by side; a search for the best. See fzero/planner."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import click

from fzero.cli.flags import FOLDER, SHORTHANDS, config_flags, config_of, parse_mesh, table_of

SEARCHED = ("mesh", "zero", "remat", "offload", "micro_batch", "sequence")  # what a search chooses


@click.command()
@config_flags
@click.option("--gpu", default="h100", show_default=True, help="a100, h100, h200, b200, mi300x, here (see fzero bench), or a device file.")
@click.option("--gpus-per-node", "--ranks-per-node", "ranks_on_node", type=int, help="Ranks on a machine; as the device's links.")
@click.option("--tokens", type=float, help="A budget of tokens, such as 1e12: show the days and the cost of it.")
@click.option("--price-per-gpu-hour", "price", type=float, help="What one device costs an hour.")
@click.option("--rank", type=int, default=0, show_default=True, help="The rank whose memory is shown.")
@click.option("--search", "searches", is_flag=True, help="Find mesh, stage, recomputation, offload and micro-batch for --gpus devices.")
@click.option("--gpus", type=int, help="Devices of a search.")
@click.option("--top", type=int, default=10, show_default=True, help="How many a search shows.")
@click.option("--out", type=FOLDER, metavar="RUN.TOML", help="Where a search writes the best config, .toml or .json, for fzero pretrain.")
@click.option(
    "--vary", metavar="NAME=A,B", multiple=True, help="Plan each of these values, a row each: remat=none,full. Repeatable: their product."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    config_file: Path | None,
    settings: tuple[str, ...],
    mesh: str | None,
    gpu: str,
    searches: bool,
    gpus: int | None,
    top: int,
    out: Path | None,
    vary: tuple[str, ...],
    as_json: bool,
    **others: Any,
) -> None:
    """Predict memory, communication, time and cost of a run, without its hardware and its weights."""
    flags = {name: others.pop(name) for name in SHORTHANDS}
    expect_numbers({**others, "gpus": gpus, "top": top})
    if searches and vary:
        raise ValueError("--search and --vary are two things; give one of them")
    if not searches and (out or gpus is not None):
        raise ValueError(f"{'--out' if out else '--gpus'} is for --search; add that, or leave it out")
    if searches:
        given = [f"--{name.replace('_', '-')}" for name in SEARCHED if {**flags, "mesh": mesh}[name] is not None]
        if given:
            raise ValueError(f"--search chooses {', '.join(given)} itself; leave that out")
        if gpus is None:
            raise ValueError("--search needs --gpus, the number of devices")
    table = table_of(config_file, settings, mesh, flags)
    config = config_of(table, None, from_json=config_file is not None and config_file.suffix == ".json")
    if searches:
        del others["rank"]
        answer = searched(config, gpus, gpu, top, out, others)
    elif vary:
        from fzero.planner import vary as variants

        answer = variants.vary(table, parse_choices(vary), gpu=gpu, **others)
    else:
        from fzero.planner import plan as plans

        answer = plans.plan(config, gpu=gpu, **others)
    click.echo(answer.to_json() if as_json else str(answer))


def parse_choices(texts: tuple[str, ...]) -> dict[str, list[Any]]:
    """{name: values} of texts NAME=A,B. Where a text has a semicolon, semicolons separate: values of mesh and offload have commas.

    NAME is a flag of a config, `mesh`, `gpu`, or a dotted name of the config.
    """
    choices: dict[str, list[Any]] = {}
    for text in texts:
        given, equals, values = text.partition("=")
        name = SHORTHANDS.get(given.strip().replace("-", "_"), given.strip())
        if not equals or not name:
            raise ValueError(f"--vary {text!r} is not of the form NAME=A,B, such as remat=none,full")
        if name in choices:
            raise ValueError(f"--vary gives {name} twice; give all its values at once")
        parts = [part.strip() for part in values.split(";" if ";" in values else ",")]
        choices[name] = [parse_mesh(part, "--vary mesh=") if name == "mesh" else parse_value(part) for part in parts]
    return choices


def parse_value(text: str) -> Any:
    """A number or a truth value in TOML's syntax; any other text as it is."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def searched(config: Any, gpus: int, gpu: str, top: int, out: Path | None, options: dict[str, Any]) -> Any:
    """The SearchResult of a search; its best config is written to `out`."""
    from fzero.planner import search
    from fzero.run.machine import cores

    if out is not None:
        search.expect_config_path(out)
    result = search.search(config, gpus, gpu=gpu, top=top, say=progress, workers=cores(), **options)
    if out is not None:
        search.write_config(result.config, out)
        ranks = "" if gpus == 1 else f"torchrun --nproc-per-node {min(gpus, result.best[0].report.ranks_on_node)} -m "
        print(f"wrote {out}; start it with: {ranks}fzero pretrain --config {out}", file=sys.stderr)
    return result


def expect_numbers(options: dict[str, Any]) -> None:
    """Raise ValueError for a number that must be above 0 and is not."""
    names = {"ranks_on_node": "--gpus-per-node", "tokens": "--tokens", "price": "--price-per-gpu-hour", "gpus": "--gpus", "top": "--top"}
    for key, name in names.items():
        value = options[key]
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value:g}; it must be above 0")


def progress(line: str) -> None:
    """Print a line on stderr at once, where that is a terminal."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)

"""The commands that prepare and convert: data, import, export, doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from fzero.cli.flags import FOLDER
from fzero.cli.process import say


@click.group(name="data")
def data_group() -> None:
    """Corpora."""


@data_group.command()
@click.argument("sources", nargs=-1)
@click.option("--out", type=FOLDER, required=True, metavar="FOLDER", help="The new folder of the corpus.")
@click.option("--tokenizer", default="bytes", show_default=True, help="bytes, bpe:N, or the path of a tokenizer.json.")
@click.option("--val-fraction", type=float, default=0.02, show_default=True, help="The part of the documents kept for validation.")
@click.option("--eos", help="The end-of-document token of a tokenizer.json.")
@click.option("--text-key", default="text", show_default=True, help="Where a .jsonl line has its text.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the choice of validation documents.")
def prepare(sources: tuple[str, ...], out: Path, **options: Any) -> None:
    """Turn text (files, folders, '-', stdlib) into a corpus of token files."""
    from fzero import data

    say(data.describe(data.prepare(list(sources), out, **options)))


@click.command(name="import")
@click.argument("source", type=FOLDER)
@click.option("--out", type=FOLDER, required=True, metavar="RUN", help="The new run folder.")
@click.option("--config", type=FOLDER, metavar="HF_CONFIG.json", help="The model's sizes; without it config.json in SOURCE.")
def import_command(source: Path, out: Path, config: Path | None) -> None:
    """Make a run folder of a GPT-2, Llama or Mixtral that another system saved.

    SOURCE is a folder of Hugging Face transformers, a torch.distributed.checkpoint, or a DeepSpeed universal checkpoint.
    """
    from fzero.run import exchange

    say(exchange.import_weights(source, out, config))


@click.command()
@click.argument("run", type=FOLDER)
@click.option("--out", type=FOLDER, required=True, metavar="HF_FOLDER", help="The new folder.")
@click.option("--ema", is_flag=True, help="Export the average of the weights.")
def export(run: Path, out: Path, ema: bool) -> None:
    """Write the model of a run as Hugging Face transformers reads it."""
    from fzero.run import exchange

    line, passed = exchange.export_hf(run, out, ema=ema)
    for warning in passed:
        print(warning, file=sys.stderr)
    say(line)


@click.command()
def doctor() -> None:
    """Show what this machine has and what fzero will use."""
    from fzero.run import machine

    say(machine.diagnose())

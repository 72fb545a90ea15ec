"""The command line: the list of commands, and the entry that runs one of them (fzero/cli/process.py says how it ends).

Nothing heavy is imported before a command runs, so that `fzero --help` is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from fzero import __version__
from fzero.cli import process
from fzero.cli.bench import bench
from fzero.cli.checkpoint import ckpt
from fzero.cli.data import data_group, doctor, export, import_command
from fzero.cli.plan import plan
from fzero.cli.pretrain import pretrain
from fzero.cli.replay import bisect, replay
from fzero.cli.report import report
from fzero.cli.sample import sample


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="fzero")
@click.option("--traceback", is_flag=True, help="Show where an error came from (also: FZERO_TRACEBACK=1).")
@click.pass_context
def cli(context: click.Context, traceback: bool) -> None:
    """fzero trains large models as pure functions. `fzero pretrain` alone trains a small one on Python's standard library."""
    size, command = os.environ.get("WORLD_SIZE", "1"), context.invoked_subcommand
    if size != "1" and command not in ("pretrain", "replay"):
        raise ValueError(f"fzero {command} runs in one process and this is one of {size}; start it without torchrun")


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0, or 2 with one line on stderr for a mistake, or 130 for Ctrl-C."""
    args = list(sys.argv[1:] if args is None else args)
    traceback = os.environ.get("FZERO_TRACEBACK", "0") not in ("", "0") or "--traceback" in args
    sys.exit(process.run(lambda: cli.main(args, prog_name="fzero", standalone_mode=False), traceback=traceback))


for command in (pretrain, sample, replay, bisect, bench, ckpt, plan, report, data_group, import_command, export, doctor):
    cli.add_command(command)

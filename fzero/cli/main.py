"""The command line: parses, calls, and turns every mistake into one line on stderr and exit code 2.

Nothing heavy is imported before a command runs, so that `fzero --help` is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from fzero import __version__
from fzero.cli.bench import bench
from fzero.cli.checkpoint import ckpt
from fzero.cli.data import data_group, doctor, export, import_command
from fzero.cli.plan import plan
from fzero.cli.pretrain import bisect, pretrain, replay, sample
from fzero.cli.report import report
from fzero.run.ranks import signals


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
    show = os.environ.get("FZERO_TRACEBACK", "0") not in ("", "0") or "--traceback" in args
    try:
        code = cli.main(args, prog_name="fzero", standalone_mode=False)
    except click.ClickException as error:
        sys.exit(fail(error.format_message(), error))
    except (KeyboardInterrupt, click.Abort):
        if os.environ.get("RANK", "0") == "0":
            print("fzero: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        known = (ValueError, FloatingPointError, OSError, MemoryError)
        kind = type(error).__name__
        if kind == "Ended":  # another rank has said why
            sys.exit(2)
        if isinstance(error, signals.Stopped):
            sys.exit(leave(error))
        # torch raises RuntimeError where memory ends.
        memory = isinstance(error, RuntimeError) and ("allocate" in str(error) or "bad_alloc" in str(error))
        if show or not (isinstance(error, known) or kind == "RankError" or memory):
            last_words(f"{kind}: {error}", error)  # the traceback is this rank's
            raise
        message = str(error) or kind
        if memory:
            message = f"out of memory ({error}); a smaller --micro-batch, --seq-len or model needs less"
        sys.exit(fail(message, error))
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str, error: Exception) -> int:
    """Print the one line of an error, unless another rank has; returns the exit code."""
    text, code = last_words(" ".join(message.split()), error)
    if text:
        print(f"fzero: error: {text}", file=sys.stderr, flush=True)
    return code


def last_words(text: str, error: Exception) -> tuple[str, int]:
    """See fzero.run.ranks.coordinator.last_words, which is not loaded where torchrun is not."""
    if not signals.launched():
        return text, 2
    from fzero.run.ranks import coordinator

    return coordinator.last_words(text, getattr(error, "team", None), lost=type(error).__name__ == "RankError")


def leave(error: signals.Stopped) -> int:
    """The exit code of a process that a signal ended before there was anything to save; the other ranks end too."""
    team = getattr(error, "team", None)
    if team is None and signals.launched():
        return 128 + error.number  # torchrun ends the others
    if team is not None:
        team.stop(error.number)
    if team is None or team.first:
        print(f"fzero: {error}; there was nothing to save", file=sys.stderr, flush=True)
    return signals.exit_code(error.number)


for command in (pretrain, sample, replay, bisect, bench, ckpt, plan, report, data_group, import_command, export, doctor):
    cli.add_command(command)

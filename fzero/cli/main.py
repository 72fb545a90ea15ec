"""The command line: the list of commands, and the entry that runs one of them.

Heavy imports wait until a command runs, so that `fzero --help` is quick.
"""

from __future__ import annotations

import os
import pkgutil
import re
import sys
from collections import UserDict
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from fzero import __version__
from fzero.cli import process
from fzero.core import compile_cache
from fzero.run.setup import signals

COMPLETION = "_FZERO_COMPLETE"  # the variable by which a shell asks click for completions
# Every command once, in the order of work, and the object that is loaded when it is asked for.
SECTIONS = {
    "Before a run": {
        "doctor": "fzero.cli.data:doctor",
        "bench": "fzero.cli.bench:bench",
        "models": "fzero.cli.data:models",
        "config": "fzero.cli.data:config_command",
        "plan": "fzero.cli.plan:plan",
        "data": "fzero.cli.data:data_group",
    },
    "A run": {
        "pretrain": "fzero.cli.pretrain:pretrain",
        "finetune": "fzero.cli.finetune:finetune",
        "sample": "fzero.cli.sample:sample",
        "generate": "fzero.cli.generate:generate",
    },
    "After a run": {
        "evaluate": "fzero.cli.evaluate:evaluate",
        "report": "fzero.cli.report:report",
        "ckpt": "fzero.cli.checkpoint:ckpt",
        "export": "fzero.cli.data:export",
        "import": "fzero.cli.data:import_command",
    },
    "If a run goes wrong": {"replay": "fzero.cli.report:replay", "bisect": "fzero.cli.report:bisect"},
}
EXAMPLES = """Examples:
  fzero pretrain                               train a small model on Python's standard library
  fzero plan --gpu h100 --model llama-8b       what a run would need, before it runs
  fzero report runs/first                      what a run did, on one page"""


def first_sentence(text: str) -> str:
    """The first sentence of a help text, in one line."""
    words = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[^.])\. ", words)[0].rstrip(".") + "."


class Commands(UserDict[str, Any]):
    """The commands by name, each imported when first used."""

    def __getitem__(self, name: str) -> click.Command:
        value = self.data[name]
        if isinstance(value, str):
            value = self.data[name] = pkgutil.resolve_name(value)
        return value


class Sections(click.Group):
    """A group whose help shows its commands by SECTIONS, each with a whole sentence."""

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section, and the examples."""
        widest = max(map(len, self.commands))
        for title, names in SECTIONS.items():
            with formatter.section(title):
                rows = [(name.ljust(widest), first_sentence(self.commands[name].help or "")) for name in names]
                formatter.write_dl(rows)
        formatter.write_paragraph()
        formatter.write(EXAMPLES + "\n")


@click.group(
    cls=Sections,
    commands=Commands({name: value for section in SECTIONS.values() for name, value in section.items()}),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(__version__, prog_name="fzero")
@click.option("--traceback", is_flag=True, help="Show the traceback of an error (also: FZERO_TRACEBACK=1).")
@click.pass_context
def cli(context: click.Context, traceback: bool) -> None:
    """fzero trains large models as pure functions. `fzero pretrain` alone trains a small one on Python's standard
    library."""
    size, command = signals.expect_environment(), context.invoked_subcommand
    if size != 1 and command not in ("pretrain", "finetune", "replay", "generate"):
        raise ValueError(f"fzero {command} runs in one process and this is one of {size}; start it without torchrun")


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0, or as `process.run` says."""
    if args is None:  # a process of its own, in which nobody changes what fzero's functions do
        compile_cache.allow_programs()
    args = list(sys.argv[1:] if args is None else args)
    process.escape_output()
    traceback = os.environ.get("FZERO_TRACEBACK", "0") not in ("", "0") or "--traceback" in args

    def command() -> Any:
        process.expect_text(args)
        if COMPLETION in os.environ:
            cli.main(args, prog_name="fzero", complete_var=COMPLETION)
        try:  # as `cli.main` does, which prints an empty line at Ctrl-C
            with process.plain_warnings(), cli.make_context("fzero", args) as context:
                return cli.invoke(context)
        except click.exceptions.Exit as end:
            return end.exit_code

    sys.exit(process.run(command, traceback=traceback))

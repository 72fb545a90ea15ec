"""`fzero config`: every value of a config with its meaning, or what differs from a run's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fzero.cli.flags import FOLDER, config_flags, config_of, table_of


@click.command("config")
@config_flags
@click.option("--diff", "run", type=FOLDER, metavar="RUN", help="Show the values that differ from those of this run.")
def config_command(
    config_file: Path | None, settings: tuple[str, ...], mesh: str | None, run: Path | None, **flags: Any
) -> None:
    """Show every value of a run's config with its meaning, as a file for --config."""
    from fzero.run.config import config_table
    from fzero.run.setup import run_folder

    table = table_of(config_file, settings, mesh, flags)
    config = config_of(table, config_file)
    if run is None:
        click.echo(config_table.commented(config), nl=False)
        return
    lines = config_table.differences(config, run_folder.read_config(run))
    click.echo("\n".join(lines) if lines else f"the config is that of {run}")

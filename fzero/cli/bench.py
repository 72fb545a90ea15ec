"""`fzero bench`: measure this machine, for plans; and `fzero bench disk`: find the settings of a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fzero.cli.flags import FOLDER, Number
from fzero.cli.process import progress


@click.group(name="bench", invoke_without_command=True)
@click.option(
    "--out",
    type=FOLDER,
    metavar="FILE",
    help="Where to write. A .json file; default: device.json beside the user's config.toml.",
)
@click.option(
    "--quick", is_flag=True, help="Measure fewer figures in half a minute: one thread, and links between two processes."
)
@click.option(
    "--only",
    multiple=True,
    metavar="PART",
    help="Measure only this part and keep the file's figures of the others. Repeatable.",
)
@click.option("--disk", type=FOLDER, metavar="DIR", help="Also measure the disk of this folder.")
@click.option(
    "--device",
    default="auto",
    help="The device to compute on. auto (the default: the GPU where there is one), cpu or cuda.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of text. It is the device file.")
@click.pass_context
def bench(context: click.Context, **options: Any) -> None:
    """Measure this machine and write a device file, for `fzero plan --gpu here`.

    The parts are memory, gemm, steps, fused, links, and of a GPU attention. Takes about three minutes, on an otherwise
    idle machine."""
    if context.invoked_subcommand is None:
        bench_machine(**options)


def bench_machine(
    out: Path | None, quick: bool, only: tuple[str, ...], disk: Path | None, device: str, as_json: bool
) -> None:
    """Run `fzero bench`."""
    from fzero.core import gpu, host_memory
    from fzero.planner import devices
    from fzero.planner.calibrate import machine
    from fzero.run.setup.machine import device_file

    path = device_file() if out is None else out
    if path.suffix != ".json":
        raise ValueError(f"--out is {str(path)!r}; a device file is a .json file")
    if device not in gpu.KINDS:
        raise ValueError(f"--device is {device!r}; it must be auto, cpu or cuda")
    device = gpu.resolve_device(device)
    if device == "cpu" and "attention" in only:
        raise ValueError("--only is attention, which is measured on a GPU, and the device is cpu; leave it out")
    previous = None
    if only and path.is_file():
        previous = devices.device(path)
        if previous.kind != device:
            raise ValueError(f"{path}: is of a {previous.kind} device and --device is {device}; give another --out")
    host_memory.bind_threads(host_memory.find_placement(gpu.use_device(device)).cores)  # where a run has its threads
    effort = machine.Effort(tuple(only) or machine.PARTS, quick, device)
    calibration = machine.measure(effort, disk=disk, previous=previous, say=progress)
    machine.save(calibration, path)
    click.echo(devices.to_json(calibration) if as_json else f"{machine.describe(calibration)}\nwritten to {path}")


@bench.command(name="disk")
@click.argument("folder", type=FOLDER, metavar="DIR")
@click.option(
    "--size-gb",
    type=Number(float, (0.0022, True, 1e6)),
    default=2.0,
    show_default=True,
    help="The size of its two temporary files together.",
)
@click.option(
    "--seconds",
    type=Number(float, (0.0, False, 60, True)),
    default=0.5,
    show_default=True,
    help="The time for each of about 160 figures.",
)
@click.option("--no-write-config", is_flag=True, help="Do not change the user's config.toml.")
def bench_disk(folder: Path, size_gb: float, seconds: float, no_write_config: bool) -> None:
    """Measure the disk of DIR and write the best settings into the user's config.toml, for runs with --nvme there."""
    size = int(size_gb * 1e9 / 2) >> 20 << 20
    from fzero.planner.calibrate import disk as disks

    click.echo(
        disks.bench_disk(folder, size=size, seconds=seconds, write_config=not no_write_config, progress=progress)
    )

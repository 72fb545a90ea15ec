"""`fzero generate`: the completions of a file of prompts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fzero.cli import process
from fzero.cli.flags import DEVICE, EMA, FOLDER, GUESSES, PARAMS_ON_DISK, QUANTIZE, Number, add_flags, parse_mesh
from fzero.cli.process import say
from fzero.core.config_tables import COUNT, POSITIVE, RATE, SEED, SIZE

SHARE = (0.0, False, 1.0, True)


def sampling_flag(name: str, kind: type[int] | type[float], bounds: Any, text: str) -> Callable[..., Any]:
    """The option of a number of `Sampling`; one that is not given is as that has it."""
    return click.option(name, type=Number(kind, bounds), help=text)


ANY, UNIT = (-1e4, True, 1e4, True), (0.0, True, 1.0, True)  # bounds of numbers


# Each sets the field of its name, for the lines that do not.
SAMPLING = (
    sampling_flag("--temperature", float, RATE, "The sampling temperature. 0 takes the likeliest token. Default: 1."),
    sampling_flag("--top-k", int, COUNT, "Sample from the K likeliest tokens. 0 samples from all. Default: 0."),
    sampling_flag("--top-p", float, SHARE, "Sample from the likeliest tokens whose probabilities add up to P."),
    sampling_flag(
        "--min-p", float, (0.0, True, 1.0, True), "Sample from tokens at least P times as likely as the likeliest."
    ),
    sampling_flag("--repetition", float, POSITIVE, "Above 1, tokens of prompt and text become less likely."),
    sampling_flag("--presence", float, ANY, "What a token that the text has loses of its logit."),
    sampling_flag("--frequency", float, ANY, "What it loses for each time that the text has it."),
    click.option("--stop", multiple=True, metavar="TEXT", help="A text that ends a completion. Repeatable."),
    click.option(
        "--stop-id",
        "stop_ids",
        type=Number(int, COUNT),
        multiple=True,
        help="An id that ends a completion. Repeatable.",
    ),
    click.option("--include-stop", is_flag=True, help="Whether a completion has the text of --stop that ended it."),
    click.option("--ignore-eos", is_flag=True, help="Whether the model's end of text ends no completion."),
    sampling_flag("--min-tokens", int, COUNT, "The fewest tokens of a completion."),
    sampling_flag("--max-tokens", int, SIZE, "The most tokens of a completion. Default: 200."),
    sampling_flag("--n", int, SIZE, "The completions of each prompt. Default: 1."),
    sampling_flag("--seed", int, SEED, "The seed of all random numbers. Default: 0."),
    sampling_flag("--alternatives", int, COUNT, "Log-probabilities of so many likeliest tokens beside each drawn one."),
)
MAX_TOKENS = 200


def with_sampling(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags of `Sampling`, and those of parameters on a disk."""
    return add_flags(command, (*PARAMS_ON_DISK, *SAMPLING))


@click.command()
@click.argument("run", type=FOLDER)
@click.option("--prompts", type=FOLDER, metavar="FILE.jsonl", help="A prompt a line, see docs.")
@click.option("--out", type=FOLDER, metavar="FILE.jsonl", help="Where to write. A file of completions.")
@click.option("--replay", type=FOLDER, metavar="FILE.jsonl", help="Make the completions of a file again, and compare.")
@click.option("--log-probs", is_flag=True, help="Write log-probabilities of prompts and completions too.")
@click.option("--rows", type=Number(int, SIZE), default=32, show_default=True, help="The completions at a time.")
@click.option("--step-tokens", type=Number(int, SIZE), default=512, show_default=True, help="The tokens of a step.")
@click.option("--pages", type=Number(int, SIZE), help="The pages of 16 positions. Default: as many as --rows need.")
@click.option("--kernels", default="auto", show_default=True, help="The form of operations. canonical: equal bits.")
@click.option(
    "--cache",
    default="auto",
    show_default=True,
    help="What keys and values are in: int8 or fp8. They need less memory.",
)
@QUANTIZE
@GUESSES[0]
@GUESSES[1]
@click.option(
    "--mesh", help="The sizes of the axes dp, rp, tp, pp, cp, ep. Here of dp and tp. Default: dp over all processes."
)
@EMA
@DEVICE
@with_sampling
def generate(
    run: Path,
    prompts: Path | None,
    out: Path | None,
    replay: Path | None,
    log_probs: bool,
    rows: int,
    step_tokens: int,
    pages: int | None,
    kernels: str,
    cache: str,
    quantize: str | None,
    draft: Path | None,
    guesses: int | None,
    mesh: str | None,
    ema: bool,
    device: str | None,
    offload: str | None,
    nvme: str | None,
    **fields: Any,
) -> int:
    """Continue each prompt of a file with a run's model, or one of transformers. A second call makes only what is
    missing in the file of the completions. With --replay the exit code is 1 if a completion is another one now."""
    from fzero.core import gpu
    from fzero.generate import GenerateOptions, Sampling
    from fzero.kernels import Kernels
    from fzero.run.runner.generate_file import generate_file
    from fzero.run.runner.replay_completions import replay_file
    from fzero.run.setup.text_model import guess_options, load_text_model

    fields = {name: value for name, value in fields.items() if value is not None}  # as `Sampling` has the others
    expect_files(prompts, out, replay, {"log_probs": log_probs, **fields})
    sampling = Sampling(**{"max_tokens": MAX_TOKENS, **fields})
    kernels = str(Kernels.parse(kernels))
    if step_tokens < rows:
        raise ValueError(
            f"--step-tokens is {step_tokens} and --rows {rows}, each of which computes a token of a step; give at least"
            f" {rows}, or fewer rows"
        )
    # All that decides a step, as ranks of tp compute the same ones.
    flags = {"RUN": str(run), "--prompts": str(prompts), "--out": str(out), "--mesh": mesh, "sampling": str(sampling)}
    flags |= {"--replay": str(replay), "--kernels": kernels, "--log-probs": log_probs, "--ema": ema, "--device": device}
    flags |= {"--rows": rows, "--cache": cache, "--quantize": quantize, "--draft": str(draft), "--guesses": guesses}
    with process.coordinated() as coordinator:
        coordinator.compare({**process.versions(), **flags}, "start all ranks with the same command")
        with display("loading the weights", coordinator) as show:
            torch_device = gpu.use_device(gpu.resolve_device(device or "auto"), coordinator.local_size)
            ranks = coordinator.mesh(parse_mesh(mesh) if mesh else {"dp": coordinator.size}, device=torch_device)
            stored = {"offload": offload, "nvme": nvme, "quantize": quantize}
            text_model = load_text_model(run, ema=ema, device=torch_device, mesh=ranks, **stored)
            guessing, warnings = guess_options(text_model, draft, guesses)
            for line in (*text_model.warnings, *warnings) if coordinator.first else ():
                print(line, file=sys.stderr)
            limits = {"vocab_size": text_model.vocab_size, "ends": text_model.ends, "cache": cache, **guessing}
            limits |= {"device": str(torch_device), "decode": text_model.tokenizer.decode}
            options = GenerateOptions(rows, step_tokens, pages, kernels=kernels, **limits)
            show("reading the prompts")
            differing, calls = 0, {"coordinator": coordinator, "show": lambda progress: show(progress.text())}
            if replay:
                calls["show"] = lambda done, total: show(f"{done:,} of {total:,} completions")
                result = replay_file(text_model, replay, options, **calls)
                differing, said = len(result.differences), result.lines()
            else:
                assert prompts and out  # see `expect_files`
                progress = generate_file(text_model, prompts, out, sampling, options, log_probs=log_probs, **calls)
                said = [f"{out}: {progress.summary()}"]
        for line in said if coordinator.first else ():
            say(line)
        coordinator.close()
    return 1 if differing else 0


def expect_files(prompts: Path | None, out: Path | None, replay: Path | None, flags: dict[str, Any]) -> None:
    """Raise ValueError unless there are --prompts and --out, or --replay without what its lines say."""
    files = {"prompts": prompts, "out": out}
    if replay is None:
        for name in files:
            if files[name] is None:
                raise ValueError(f"--{name} is missing; give --prompts and --out, or --replay")
        return
    for name, value in {**files, **flags}.items():
        if value is not None and value is not False and value != ():
            flag = "stop-id" if name == "stop_ids" else name.replace("_", "-")
            raise ValueError(f"--{flag} is for new completions, and --replay makes those of a file; leave one out")


def display(stage: str, coordinator: Any) -> Any:
    """A context of a function that shows a stage on the terminal of the first rank, if there is one."""
    if coordinator.first and sys.stderr.isatty():
        return process.Progress(stage)
    return contextlib.nullcontext(lambda stage: None)

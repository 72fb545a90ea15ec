"""The questions of `fzero plan --ask`: their flags, and who answers them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fzero.cli.flags import Number, add_flags
from fzero.cli.process import Progress
from fzero.core.config_tables import LENGTH, POSITIVE

GENERATION = ("generate", "serve")
QUESTIONS = ("longest", "fewer-bytes", *GENERATION)  # of --ask
OF_SEARCH = ("fewer-bytes",)  # which may be asked of the best plan of a search
LENGTHS = {  # of --ask generate and serve: {flag: its argument}
    "--prompt-tokens": "prompt_tokens",
    "--new-tokens": "new_tokens",
    "--step-tokens": "step_tokens",
    "--cache": "cache",
}
RATE = "rate"


def question_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --ask and the flags of its questions to `command`."""
    options = (
        click.option(
            "--ask",
            "question",
            type=click.Choice(QUESTIONS),
            help="A question. longest: of sequences that train on one device, and where each byte goes. fewer-bytes: "
            "what codecs and local steps gain on slow links between nodes. generate: pages, batch and tokens/s of "
            "generation. serve: the same for a rate of requests.",
        ),
        click.option("--prompt-tokens", type=Number(int, LENGTH), help="--ask generate: tokens of a prompt. [512]"),
        click.option("--new-tokens", type=Number(int, LENGTH), help="--ask generate: new tokens of a request. [128]"),
        click.option("--step-tokens", type=Number(int, LENGTH), help="The tokens of a step."),
        click.option("--cache", help="What keys and values are in: int8 or fp8. Default: what weights are in."),
        click.option("--rate", type=Number(float, POSITIVE), help="--ask serve: requests a second, of all ranks."),
    )
    return add_flags(command, options)


def workload_of(question: str | None, flags: dict[str, Any]) -> dict[str, Any]:
    """The lengths and the rate of a command line, which leave its flags; raises ValueError for those without use."""
    values = {name: flags.pop(name) for name in (*LENGTHS.values(), RATE)}
    given = {name: value for name, value in values.items() if value is not None}
    for flag, name in LENGTHS.items():
        if name in given and question not in GENERATION:
            raise ValueError(f"{flag} is for --ask generate and --ask serve; add one of them, or leave it out")
    if RATE in given and question != "serve":
        raise ValueError("--rate is for --ask serve; add that, or leave it out")
    if question == "serve" and RATE not in given:
        raise ValueError("--ask serve needs --rate, the requests a second")
    return given


def answer_question(question: str, config: Any, device: Any, cache: Path | None, workload: dict[str, Any]) -> Any:
    """The answer to one of QUESTIONS about a config on a device. cache: of traces, for plans. workload: see
    `workload_of`."""
    from fzero.planner.generation import Workload, plan_generation, serve
    from fzero.planner.max_sequence import longest
    from fzero.planner.slow_link_options import fewer_bytes

    with Progress("planning") as show:
        if question in GENERATION:
            rate = workload.pop(RATE, None)
            answer = plan_generation(config, gpu=device, workload=Workload(**workload), say=show)
            return answer if rate is None else serve(answer, rate)
        return longest(config, device, show) if question == "longest" else fewer_bytes(config, device, show, cache)

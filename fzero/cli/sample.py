"""`fzero sample`: generate text with a trained model."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from fzero.cli.flags import DEVICE, EMA, FOLDER, GUESSES, PARAMS_ON_DISK, QUANTIZE, Number
from fzero.cli.process import say
from fzero.core.config_tables import COUNT, RATE, SEED, SIZE


@click.command()
@click.argument("run", type=FOLDER)
@click.option("--prompt", metavar="TEXT", required=True, help="The text to continue. With --chat a message to answer.")
@click.option(
    "--chat/--no-chat",
    default=None,
    help="Take the prompt as a user's message, by the model's chat template. Default: if conversations were learnt.",
)
@click.option(
    "--max-new-tokens",
    type=Number(int, SIZE),
    default=200,
    show_default=True,
    help="The number of tokens to generate. Less, if the text ends before.",
)
@click.option(
    "--temperature",
    type=Number(float, RATE),
    default=0.8,
    show_default=True,
    help="The sampling temperature. 0 takes the likeliest token.",
)
@click.option(
    "--top-k",
    type=Number(int, COUNT),
    default=0,
    show_default=True,
    help="Sample from the K likeliest tokens. 0 samples from all.",
)
@click.option(
    "--top-p",
    type=Number(float, (0.0, False, 1.0, True)),
    default=1.0,
    show_default=True,
    help="Sample from the likeliest tokens whose probabilities add up to P.",
)
@click.option(
    "--seed",
    type=Number(int, SEED),
    default=0,
    show_default=True,
    help="The seed of all random numbers. The same seed gives the same text.",
)
@QUANTIZE
@GUESSES[0]
@GUESSES[1]
@EMA
@DEVICE
@PARAMS_ON_DISK[0]
@PARAMS_ON_DISK[1]
def sample(
    run: Path,
    prompt: str,
    chat: bool | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    quantize: str | None,
    draft: Path | None,
    guesses: int | None,
    ema: bool,
    device: str | None,
    offload: str | None,
    nvme: str | None,
) -> None:
    """Generate text with the model of a run (or an import), as it is drawn."""
    from fzero.core import gpu
    from fzero.generate import Sampling
    from fzero.run.runner.continue_text import continue_text
    from fzero.run.setup import vocabulary
    from fzero.run.setup.text_model import guess_options, load_text_model

    sampling = Sampling(temperature, top_k, top_p, max_tokens=max_new_tokens, seed=seed)
    torch_device = gpu.use_device(gpu.resolve_device(device or "auto"))
    text_model = load_text_model(run, ema=ema, device=torch_device, offload=offload, nvme=nvme, quantize=quantize)
    chat = vocabulary.answers_messages(text_model.config, run) if chat is None else chat
    guessing, warnings = guess_options(text_model, draft, guesses)
    for line in (*text_model.warnings, *warnings, *(text_model.template_warnings() if chat else ())):
        print(line, file=sys.stderr)
    ids, ends = vocabulary.prompt_ids(run, text_model.tokenizer, prompt, chat=chat)
    place = {
        "options": {"device": str(torch_device), **guessing},
        "write": lambda text: print(text, end="", flush=True),
    }
    continue_text(text_model.model, text_model.params, text_model.tokenizer, ids.tolist(), ends, sampling, **place)
    say("")

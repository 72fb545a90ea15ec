"""`fzero sample`: generate text with a trained model."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from fzero.cli.flags import DEVICE, EMA, FOLDER, Number
from fzero.cli.process import say
from fzero.core.config_tables import COUNT, RATE, SEED


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
    type=Number(int, COUNT),
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
@EMA
@DEVICE
@click.option(
    "--offload",
    metavar="WHERE",
    help="The memory of params, grads, opt and acts. Here params=nvme, for models larger than memory.",
)
@click.option(
    "--nvme", metavar="DIR", help="The folder for state offloaded to a disk. Default: nvme-sample/ in the run folder."
)
def sample(
    run: Path,
    prompt: str,
    chat: bool | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    ema: bool,
    device: str | None,
    offload: str | None,
    nvme: str | None,
) -> None:
    """Generate text with the model of a run (or an import)."""
    import torch

    from fzero.core import gpu, prng
    from fzero.data.auto_tokenizer import missing_lines
    from fzero.data.chat import read_chat
    from fzero.run.runner.evaluate import Sampling, generate
    from fzero.run.setup import run_folder, vocabulary, weights

    sampling = Sampling(temperature, top_k, top_p)
    if offload not in (None, "params=nvme"):
        raise ValueError(f"--offload {offload}: sampling can offload only parameters; use params=nvme, or leave it out")
    if nvme is not None and offload is None:
        raise ValueError("--nvme needs --offload params=nvme; give that too")
    torch_device = gpu.use_device(gpu.resolve_device(device or "auto"))
    trained = weights.load(run, ema=ema) if offload is None else weights.load_on_disk(run, nvme, ema=ema)
    tokenizer = run_folder.read_tokenizer(run)
    for line in trained.warnings:
        print(line, file=sys.stderr)
    chat = vocabulary.answers_messages(trained.config, run) if chat is None else chat
    remedy = f"fzero finetune --init {run} --add-tokens template"
    for line in missing_lines(read_chat(run), tokenizer, remedy) if chat else ():
        print(line, file=sys.stderr)
    prompt_tokens, eos = vocabulary.prompt_ids(run, tokenizer, prompt, chat=chat)
    ids = torch.from_numpy(prompt_tokens.astype("int64"))[None].to(torch_device)
    out = generate(
        trained.model,
        weights.move_params(torch_device, trained.params),
        ids,
        max_new_tokens,
        prng.key(seed, torch_device),
        sampling=sampling,
        vocab_size=tokenizer.vocab_size,
        eos=eos,
    )
    say(tokenizer.decode(out[0].tolist()))

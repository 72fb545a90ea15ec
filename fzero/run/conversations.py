"""The conversations of a run: prepared by the tokenizer and the chat template of the model that it starts from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fzero.data.auto_tokenizer import missing_lines
from fzero.data.chat import encoder, read_chat, render
from fzero.data.examples import Lengths, describe_conversations
from fzero.data.tokenizers import Tokenizer
from fzero.models.score import head_of
from fzero.run import run_folder
from fzero.run.config import RunConfig
from fzero.run.config_checks import expect_rows
from fzero.run.objectives import Lines
from fzero.run.special_token_files import start_chat, start_tokenizer, stop_ids
from fzero.run.vocabulary import TEMPLATE, added_line, grown_tokenizer


def prepare_for(config: RunConfig, out: Path, say: Callable[[str], None], init: Path | None) -> Path:
    """Prepare the conversations at `data.path` in `out`, and return it.

    init: the run, import or folder of another system whose tokenizer and chat template are taken. Raises ValueError as
    `prepare_conversations`, and for a model without a tokenizer or a chat template.
    """
    path = Path(config.data.path)
    if path.suffix != ".jsonl":
        raise ValueError(
            f"data.path is {config.data.path!r} and objective is {config.objective}; give a .jsonl file with a "
            f"{config.task.line} a line, or a folder that was prepared of one: --data FILE.jsonl"
        )
    if init is None:
        raise ValueError(f"objective is {config.objective}, which starts from a model: --init FOLDER")
    base_tokenizer, template = start_tokenizer(init), config.data.template
    chat, tokenizer = start_chat(init, template), grown_tokenizer(init, config.data.add_tokens, template)
    expect_rows(config, tokenizer.vocab_size, f"the tokenizer of {init}")
    if config.data.add_tokens:
        say(added_line(base_tokenizer, tokenizer, config.data.add_tokens))
    for line in missing_lines(chat, tokenizer, f"--add-tokens {TEMPLATE}"):
        say(line)
    say(f"preparing {path} ({tokenizer.name}) in {out}")
    lengths = Lengths(config.data.seq_len, config.model.max_len, config.data.too_long)
    lines = Lines(path, out, init, chat, tokenizer, lengths, config.train.seed, head_of(config.model))
    meta, remarks = config.task.prepare(lines)
    for line in remarks:
        say(line)
    say(describe_conversations(meta))
    return out


def answers_messages(config: RunConfig, folder: Path) -> bool:
    """Whether the model of the run in `folder` answers a prompt as a message, and does not continue it as a text."""
    return config.task.examples and (config.task.of_tokens or read_chat(folder) is not None)


def prompt_ids(folder: Path, tokenizer: Tokenizer, text: str, *, chat: bool) -> tuple[np.ndarray, list[int]]:
    """(the ids [N] to generate after, the ids that end the text) for a prompt to the model of the run in `folder`.

    chat: the prompt is a user's message, which the run's chat template renders, and the text the answer; else a text,
    with the tokens that the tokenizer puts around it, which the documents of a run that began without weights do not
    have. The ends are those of `stop_ids`. Raises ValueError if the run has no chat template.
    """
    stops = stop_ids(folder, tokenizer)
    if not chat:
        foreign = "token_ids" in run_folder.read_environment(folder)
        return encoder(tokenizer)(text, add_special=True)[0] if foreign else tokenizer.encode(text), stops
    template = read_chat(folder)
    if template is None:
        raise ValueError(f"{folder}: has no chat template (chat_template.jinja); give --no-chat to continue a text")
    return encoder(tokenizer)(render(template, [{"role": "user", "content": text}], prompt=True))[0], stops

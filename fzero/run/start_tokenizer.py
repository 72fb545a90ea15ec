"""The tokenizer of what a run starts from: another run, or a folder of another system."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fzero.checkpoint.convert import peft
from fzero.core.foreign import read_json, read_text_file
from fzero.data.auto_tokenizer import read_tokenizer_json
from fzero.data.chat import Chat, read_chat
from fzero.data.special_tokens import CONFIG, special_tokens
from fzero.data.tokenizer_classes import TOKENIZER
from fzero.data.tokenizers import Tokenizer, json_tokenizer
from fzero.run import run_folder


def start_tokenizer(init: Path) -> Tokenizer:
    """The tokenizer of a run, or of a folder of another system; raises ValueError if it has none."""
    if run_folder.is_run(init):
        return run_folder.read_tokenizer(init)
    if peft.is_adapter(init):
        return start_tokenizer(peft.base_of(init))
    found = tokenizer_of(init, init / "config.json")
    if found is None:
        raise ValueError(f"{init}: has no tokenizer.json, so there is no text to read")
    return found


def start_pad(init: Path) -> int:
    """The token with which transformers fills the rows of the model in `init`: as its config.json says, else the end of
    a document. Raises ValueError as `start_tokenizer`."""
    if peft.is_adapter(init):
        return start_pad(peft.base_of(init))
    place = init / run_folder.ENVIRONMENT if run_folder.is_run(init) else init / "config.json"
    about = read_json(place, wide=True)
    pad = about.get("token_ids", about).get("pad_token_id")
    return pad if isinstance(pad, int) and pad >= 0 else start_tokenizer(init).eos


def start_chat(init: Path, template: str = "") -> Chat | None:
    """The chat template of a run, of a folder of another system, or of an adapter, which may have its base's; None if
    there is none. template: a file in place of it."""
    chat = read_chat(init)
    if chat is None and peft.is_adapter(init):
        chat = start_chat(peft.base_of(init))
    return Chat(read_text_file(template), chat.tokens if chat else {}) if template else chat


def tokenizer_of(folder: Path, hf_config: Path) -> Tokenizer | None:
    """The tokenizer in `folder` or beside a config.json, as AutoTokenizer loads it, None if there is none; its eos is
    the one that config.json names."""
    places = [place for place in (folder, hf_config.parent) if os.path.lexists(place / TOKENIZER)]
    place = (places or [folder])[0]
    beside = place if (place / CONFIG).is_file() else hf_config.parent
    content = read_tokenizer_json(place, beside)
    if content is None:
        return None
    recorded = read_json(hf_config, wide=True).get("eos_token_id")
    eos: Any = recorded[0] if isinstance(recorded, list) and recorded else recorded
    entry = f"eos_token_id of {hf_config}"
    if eos is None and (eos := special_tokens(beside).get("eos_token")) is not None:
        entry = f"eos_token of {beside / CONFIG}"
    return json_tokenizer(content, str(place / TOKENIZER), eos, entry)

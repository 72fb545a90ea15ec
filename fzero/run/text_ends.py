"""Where texts of a model begin and end: the files and ids of its folder that say so. A run keeps them as they were, and
an export gives them back, with the tokens at which the run's own texts end.

tokenizer_config.json      special tokens, padding_side, model_max_length
special_tokens_map.json    special tokens
added_tokens.json          more of them, in folders of before
generation_config.json     the ids at which `generate` stops, and how it draws
additional_chat_templates  chat templates by name, beside chat_template.jinja
config.json                bos_token_id, eos_token_id, pad_token_id: in a run's environment.json, as token_ids
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fzero.checkpoint.convert import peft
from fzero.core.foreign import expect_entries, parse_json, read_json, read_text_file
from fzero.data.chat import chat_files, end_tokens, read_chat, template_files
from fzero.data.special_tokens import ADDED, CONFIG, MAP, with_special
from fzero.data.tokenizers import Tokenizer
from fzero.run import run_folder

GENERATION = "generation_config.json"
FILES = (CONFIG, MAP, ADDED, GENERATION)
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def start_files(init: Path, *others: Path, templates: bool = True) -> dict[str, str]:
    """{name: content} of the FILES of what a run starts from: a run, a folder of another system, or an adapter, which
    may have its base's; others: folders that may have what `init` lacks; templates: with additional_chat_templates."""
    places = [init, *others]
    if peft.is_adapter(init):
        return start_files(peft.base_of(init), templates=templates) | files_in(init, templates=templates)
    return {name: text for place in reversed(places) for name, text in files_in(place, templates=templates).items()}


def with_added(files: dict[str, str], tokens: Sequence[str]) -> dict[str, str]:
    """The FILES with these tokens among the special ones of tokenizer_config.json."""
    if not tokens:
        return files
    about, named = (parse_json(files.get(name, "{}"), name, wide=True) for name in (CONFIG, MAP))
    named = {} if "added_tokens_decoder" in about else named
    return files | {CONFIG: json.dumps(with_special(about, named, tokens), indent=2, ensure_ascii=False) + "\n"}


def files_in(folder: Path, *, templates: bool = True) -> dict[str, str]:
    """{name: content} of the FILES in a folder, and of its additional_chat_templates."""
    found = {name: read_text_file(folder / name) for name in FILES if os.path.lexists(folder / name)}
    return found | (template_files(folder) if templates else {})


def start_ids(init: Path) -> dict[str, Any]:
    """{"token_ids": the ids of what a run starts from}, for its environment.json; {} if that is a run that began
    without weights."""
    if peft.is_adapter(init):
        return start_ids(peft.base_of(init))
    if not run_folder.is_run(init):
        ids_of(init / GENERATION)  # which the run gets as it is
        return {"token_ids": ids_of(init / "config.json")}
    about = run_folder.read_environment(init)
    return {"token_ids": about["token_ids"]} if "token_ids" in about else {}


def ids_of(where: Path) -> dict[str, Any]:
    """The entries of IDS in a config.json or a generation_config.json; raises ValueError for what is no id."""
    about = read_json(where, wide=True) if os.path.lexists(where) else {}
    found = {name: about[name] for name in IDS if name in about}
    expect_entries(found, {f"{name}?": int | list | None for name in IDS}, str(where))
    for name, value in found.items():
        for one in value if isinstance(value, list) else ():
            expect_entries({name: one}, {name: int}, str(where))
    return found


def run_ids(folder: Path) -> dict[str, Any]:
    """The ids that a run has from the config.json of what it comes from, {} for one that has none."""
    return dict(run_folder.read_environment(folder).get("token_ids", {}))


def listed(ids: Any) -> list[int]:
    """An entry of IDS as a list."""
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def stop_ids(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """The ids that end a text of the run in `folder`: those at which `generate` of transformers stops in the model that
    it comes from, the end of a document, and that of an answer by its chat template."""
    before = ids_of(folder / GENERATION) if os.path.lexists(folder / GENERATION) else {}
    chat = read_chat(folder)
    found = [*listed(before.get("eos_token_id")), *listed(run_ids(folder).get("eos_token_id")), tokenizer.eos]
    found += end_tokens(chat, tokenizer) if chat else []
    return [one for one in dict.fromkeys(found) if one >= 0]


def export_entries(folder: Path, tokenizer: Tokenizer | None) -> tuple[dict[str, Any], dict[str, str]]:
    """(the entries of IDS for config.json, {name: content} of files to write beside it) of an export of a run.

    All are as they came, but `eos_token_id`, which gets the ids of `stop_ids` where it lacks one, and the tokens of the
    chat template."""
    ids, files, chat = run_ids(folder), files_in(folder), read_chat(folder)
    if chat is not None:
        about = parse_json(files.get(CONFIG, "{}"), str(folder / CONFIG), wide=True)
        if "token_ids" not in run_folder.read_environment(folder):  # no class of transformers built its tokenizer
            about = {"tokenizer_class": "PreTrainedTokenizerFast", **about}
        files |= chat_files(chat, about)
    if tokenizer is None:
        return ids, files
    stops = stop_ids(folder, tokenizer)
    entry = stops[0] if len(stops) == 1 else stops
    if GENERATION in files:
        about = parse_json(files[GENERATION], str(folder / GENERATION), wide=True)
        if set(listed(about.get("eos_token_id"))) != set(stops):
            files[GENERATION] = json.dumps({**about, "eos_token_id": entry}, indent=2, ensure_ascii=False) + "\n"
        return {"eos_token_id": entry, **ids}, files
    if set(listed(ids.get("eos_token_id"))) != set(stops):
        ids["eos_token_id"] = entry
    return ids, files

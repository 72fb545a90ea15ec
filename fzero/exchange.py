"""Run folders from and to folders of Hugging Face `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fzero import checkpoint, huggingface, pytree, runs
from fzero.config import recipe, to_table
from fzero.data.tokenizers import Tokenizer, json_tokenizer


def import_hf(source: Path, out: Path) -> str:
    """Make the run folder `out` of the weights and the tokenizer (where there is one) in `source`; returns a line that says so."""
    runs.expect_free(out)
    model, params = huggingface.load_hf(source)
    value = recipe("", model)
    tokenizer = tokenizer_of(source)
    there = out.exists()
    try:
        runs.create(out, value, tokenizer, imported=str(source.resolve()))
        checkpoint.save(out / runs.CHECKPOINTS, {"params": params}, step=0, config=to_table(value))
    except BaseException:
        runs.clear(out, keep=there)
        raise
    count = sum(leaf.numel() for leaf in pytree.leaves(params))
    text = f"tokenizer of {tokenizer.vocab_size:,} tokens" if tokenizer else "no tokenizer"
    return f"{out}: {count:,} parameters, {text}; train on with: fzero pretrain --init {out} --data ..."


def export_hf(run: Path, out: Path, *, ema: bool = False) -> str:
    """Write the model of `run` to the new folder `out`; returns a line that says so."""
    trained = runs.load(run, wide=True, ema=ema)
    said = runs.read_environment(run)
    tokenizer = run / runs.TOKENIZER
    huggingface.save_hf(
        out,
        trained.config.model,
        trained.params,
        tokenizer=tokenizer if tokenizer.is_file() else None,
        eos=said["eos"] if said["eos"] >= 0 else None,
    )
    return f"{out}: the model of {run} after step {trained.step}"


def tokenizer_of(source: Path) -> Tokenizer | None:
    """The tokenizer in a Hugging Face folder, None without tokenizer.json; its eos is the one that config.json names."""
    path = source / "tokenizer.json"
    if not path.is_file():
        return None
    said: Any = json.loads((source / "config.json").read_text(encoding="utf-8")).get("eos_token_id")
    eos = said[0] if isinstance(said, list) and said else said
    return json_tokenizer(path.read_text(encoding="utf-8"), str(path), eos)

"""The models `...ForSequenceClassification` of Hugging Face `transformers`: those of the families with a head of scores
in place of the vocabulary's, which has no bias.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fzero.checkpoint.convert.huggingface_families import Family
from fzero.core.foreign import expect_entries, short
from fzero.models import ScoreConfig

MOST_LABELS = 100_000  # that a number alone can ask for
# Architectures that are not called as the one that says words.
NAMES = {"GPT2LMHeadModel": "GPT2ForSequenceClassification", "Gemma3ForCausalLM": "Gemma3TextForSequenceClassification"}


def scored_family(family: Family) -> Family:
    """The family with its head of scores."""
    name = family.architecture
    return family._replace(architecture=NAMES.get(name, name.replace("ForCausalLM", "ForSequenceClassification")))


def read_labels(hf: dict[str, Any], base: Any, where: Path) -> ScoreConfig:
    """The config with the classes that a config.json names: of one class, a reward. base: of the model without the
    head. Raises ValueError for classes that are not numbered from 0."""
    expect_entries(hf, {"id2label?": dict | None, "num_labels?": int | None}, str(where))
    named = hf.get("id2label")
    if named is None:  # transformers does not write its default
        count = hf.get("num_labels")
        named = {str(i): f"LABEL_{i}" for i in range(2 if count is None else min(count, MOST_LABELS))}
    names: list[Any] = [named.get(str(i)) for i in range(len(named))]
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}: id2label is {short(named)}; it must name the classes 0, 1, ... by texts")
    kind = hf.get("problem_type") or "single_label_classification"
    if len(names) > 1 and kind != "single_label_classification":
        raise ValueError(f"{where}: problem_type is {short(kind)}; fzero learns one class of each text")
    pad = hf.get("pad_token_id")
    expect_entries({"pad_token_id": pad}, {"pad_token_id": int | None}, str(where))
    try:
        return ScoreConfig(base, tuple(names) if len(names) > 1 else (), -1 if pad is None else pad)
    except ValueError as error:
        raise ValueError(f"{where}: id2label: {error}") from None


def write_labels(config: ScoreConfig) -> dict[str, Any]:
    """The entries of config.json for the classes."""
    names = config.labels or ("LABEL_0",)
    numbered = {"id2label": {str(i): name for i, name in enumerate(names)}, "num_labels": len(names)}
    return numbered | {"label2id": {name: i for i, name in enumerate(names)}}

"""The config of a decoder that transformers' own code computes: the text of its config.json, and the sizes in it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fzero.core.text_parsing import parse_json, short
from fzero.models.config_values import check_sizes

# What a message ends with.
IN_PYTHON = "; other models train in Python: fzero.from_huggingface(folder), or fzero.from_module of an nn.Module"
INSTALL = "pip install 'transformers>=5'"
ENDLESS = 1_000_000  # positions of a decoder whose config names no number of them
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")
UNITS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")


@dataclass(frozen=True)
class DecoderConfig:
    """The config of a decoder that transformers' own code computes.

    text: its config.json. The sizes are those that transformers reads there; `fzero plan`, checks and reports need them
    where transformers is not installed. Raises ValueError for a size that is out of bounds.

    >>> DecoderConfig("PhiForCausalLM", "{}", 100, 64, 32, 2, 64, 4, 8).n_layers
    2
    """

    architecture: str  # its class
    text: str
    vocab_size: int
    max_len: int
    d_model: int
    n_layers: int
    d_ff: int
    n_heads: int
    key_dim: int  # of a head

    def __post_init__(self) -> None:
        check_sizes(self)


def read_decoder(content: Mapping[str, Any], source: str) -> DecoderConfig:
    """The DecoderConfig of the content of a config.json.

    source: its path, for messages. Raises ValueError, naming it, for what is no decoder of the installed transformers:
    an encoder-decoder, code of the folder's own, weights in codes, another head or other inputs than tokens.
    """
    refuse_entries(content, source)
    config = config_of_text(json.dumps(dict(content)), source)
    cls = class_of_decoder(config, content, source)
    size = getattr(config, "hidden_size", 0)
    heads = first_number(config, ("num_attention_heads",), 1)
    return DecoderConfig(
        architecture=cls.__name__,
        text=json.dumps(dict(content), ensure_ascii=False),
        vocab_size=config.vocab_size,
        max_len=first_number(config, POSITIONS, ENDLESS),
        d_model=size,
        n_layers=config.num_hidden_layers,
        d_ff=first_number(config, UNITS, 4 * size),
        n_heads=heads,
        key_dim=first_number(config, ("head_dim",), max(1, size // heads)),
    )


def refuse_entries(content: Mapping[str, Any], source: str) -> None:
    """Raise ValueError for what no class of transformers can change."""
    name = content.get("model_type")
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"{source}: model_type is {short(name)}; it must be the name of an architecture, such as 'phi'"
        )
    if content.get("is_encoder_decoder"):
        raise ValueError(
            f"{source}: {name} is an encoder-decoder, and a run has decoders, whose batches are tokens{IN_PYTHON}"
        )
    if content.get("quantization_config") is not None:
        raise ValueError(
            f"{source}: quantization_config is {short(content['quantization_config'])}; its weights are in codes: save "
            "the model without"
        )


def config_of_text(text: str, source: str) -> Any:
    """The config of transformers of the text of a config.json; raises ValueError for a model_type that the installed
    transformers has not, and where it is not installed."""
    content = parse_json(text, source, wide=True)
    kinds = transformers_of(source, content.get("model_type")).models.auto.configuration_auto.CONFIG_MAPPING
    name = content["model_type"]
    if name not in kinds:
        code = content.get("auto_map")
        hint = f"; its auto_map names code of the folder's own ({short(code)}), which fzero never runs" if code else ""
        version = transformers_of(source, name).__version__
        raise ValueError(f"{source}: model_type is {name!r}, which transformers {version} has no code for{hint}")
    try:
        return kinds[name].from_dict(content)
    except Exception as error:
        text = " ".join(str(error).split())
        raise ValueError(f"{source}: transformers takes no such {name}: {text}") from None


def transformers_of(source: str, name: Any) -> Any:
    """The package transformers; raises ValueError, saying what needs it, where it is not installed, or too old."""
    try:
        import transformers
        import transformers.conversion_mapping
        import transformers.models.auto.configuration_auto
    except ImportError as error:
        raise ValueError(
            f"{source}: {name} has no functions of fzero's own, and the code of transformers, which computes it, "
            f"cannot be imported ({error}); {INSTALL}"
        ) from None
    return transformers


def class_of_decoder(config: Any, content: Mapping[str, Any], source: str) -> type:
    """The class of transformers of a decoder's config; raises ValueError for one that has none, for a folder of another
    class, and for one that takes more than tokens."""
    import transformers
    from transformers.models.auto import modeling_auto

    name = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if name is None:
        raise ValueError(
            f"{source}: {config.model_type} is no decoder: transformers has no class for it that says text{IN_PYTHON}"
        )
    saved, scored = content.get("architectures") or [], name_of_scored(config)
    if saved not in ([], [name], *([[scored]] if scored else [])):
        class_names = " and ".join([name, *([scored] if scored else [])])
        raise ValueError(
            f"{source}: architectures is {saved}; of {config.model_type} fzero reads {class_names}{IN_PYTHON}"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{source}: {config.model_type} is an encoder-decoder{IN_PYTHON}")
    cls = getattr(transformers, name)
    modal_inputs = [
        param for param in inspect.signature(cls.forward).parameters if param.startswith(("pixel_", "input_features"))
    ]
    if modal_inputs or config.get_text_config() is not config:
        inputs_text = ", ".join(modal_inputs) or "a config within"
        raise ValueError(f"{source}: {name} takes more than tokens ({inputs_text}){IN_PYTHON}")
    return cls


def name_of_scored(config: Any) -> str:
    """The name of the class of transformers that has a head of scores on a decoder; "" if there is none."""
    from transformers.models.auto import modeling_auto

    return modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type, "")


def class_of_scored(config: Any, source: str) -> type:
    """The class of that name; raises ValueError if there is none."""
    import transformers

    name = name_of_scored(config)
    if not name:
        raise ValueError(
            f"{source}: transformers has no class of {config.model_type} with a head of scores, "
            "...ForSequenceClassification, which its folder needs; train it on chats or pairs (--objective chat, dpo)"
        )
    return getattr(transformers, name)


def first_number(config: Any, names: tuple[str, ...], otherwise: int) -> int:
    """The first of these entries that is a whole number above 0."""
    values = (getattr(config, name, None) for name in names)
    return next(
        (value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0), otherwise
    )

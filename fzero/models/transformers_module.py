"""Models of `transformers` as nn.Modules without memory: their class, loss, and experts that are traced.

`transformers` is imported when a function here is called.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fzero.core.pytree import nearest
from fzero.core.random_interception import seeded
from fzero.core.text_parsing import parse_json, short
from fzero.kernels.moe import group, grouped_mm, permute, unpermute
from fzero.models.configs import DecoderConfig

# What a message ends with.
IN_PYTHON = "; other models train in Python: fzero.from_huggingface(folder), or fzero.from_module of an nn.Module"
INSTALL = "pip install 'transformers>=5'"
ENDLESS = 1_000_000  # positions of a decoder whose config names no number of them
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")
UNITS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")


def read_decoder(content: Mapping[str, Any], source: str) -> DecoderConfig:
    """The DecoderConfig of a config.json; raises ValueError for what is no decoder of transformers."""
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
    """The config of transformers of the text of a config.json; raises ValueError for an unknown one."""
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
    """The class of transformers of a decoder's config; raises ValueError for none or another."""
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
    """The name of the class of transformers with a head of scores, or ""."""
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


# Each task, and where transformers lists the classes that have its head.
TASKS = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",),
    "classes": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
}
IGNORED = -100  # a label that does not count


def config_of(source: Any) -> Any:
    """A copy of the config that a source names: a folder, a file, a config or its class."""
    import transformers

    if isinstance(source, type) and issubclass(source, transformers.PretrainedConfig):
        return source()
    if isinstance(source, transformers.PretrainedConfig):
        return copy.deepcopy(source)
    if not isinstance(source, (str, Path)):
        raise TypeError(
            f"the source is a {type(source).__name__}; give a folder that transformers saved, a config.json, or a "
            "config of transformers; of a module write fzero.from_module(module, loss)"
        )
    path = Path(source)
    file = path if path.is_file() else path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path}: no such folder with a config.json; nothing is downloaded")
    config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
    vars(config).pop("quantization_config", None)  # its weights are read dequantised
    return config


def class_of(config: Any, task: str) -> tuple[type, str]:
    """(the class of transformers for a config, its task); task: "" for that of the config."""
    import transformers
    from transformers.models.auto import modeling_auto

    if task and task not in TASKS:
        raise ValueError(f"task={task!r}: it must be one of {', '.join(TASKS)}{nearest(task, TASKS)}")
    names: dict[str, tuple[str, ...]] = {}
    for candidate, tables in TASKS.items():
        for table in tables:
            classes = getattr(modeling_auto, table).get(config.model_type, ())
            names[candidate] = (*names.get(candidate, ()), *((classes,) if isinstance(classes, str) else classes))
    available = [candidate for candidate, entries in names.items() if entries]
    saved = [name for name in config.architectures or () if any(name in entries for entries in names.values())]
    if not task:
        task = next(
            (candidate for candidate in available if saved and saved[0] in names[candidate]), ""
        ) or default_task(config, available)
    if task not in available:
        raise ValueError(
            f"{config.model_type} in transformers has no class for task={task!r}; it has "
            f"{', '.join(available) or 'none that fzero trains'}"
        )
    return getattr(transformers, saved[0] if saved and saved[0] in names[task] else names[task][0]), task


def default_task(config: Any, available: list[str]) -> str:
    """The task of a config that names no architecture."""
    if getattr(config, "is_encoder_decoder", False) and "seq2seq" in available:
        return "seq2seq"
    if "causal" in available and "masked" not in available:
        return "causal"
    if len(available) == 1:
        return available[0]
    raise ValueError(f"{config.model_type}: give task=, one of {', '.join(available) or 'none that transformers has'}")


def make_module(source: Any, task: str, attention: str | None, seed: int | None) -> tuple[nn.Module, str]:
    """(the module of a source in float32, its task), drawn from `seed`, or, with None, without memory."""
    config = config_of(source)
    cls, task = class_of(config, task)
    return module_of_config(config, cls, attention, seed), task


def module_of_config(config: Any, cls: Any, attention: str | None, seed: int | None) -> nn.Module:
    """The module of a config and its class in float32; see `make_module`."""
    register_experts()
    if hasattr(config, "use_cache"):
        config.use_cache = False
    options = {"dtype": torch.float32, "attn_implementation": attention, "experts_implementation": "fzero"}
    with contextlib.ExitStack() as stack:
        if seed is None:
            stack.enter_context(parameters_without_memory())
        else:
            stack.enter_context(seeded(seed))
        return cls._from_config(config, **options)


@contextlib.contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Modules made within have their parameters on the meta device, and their buffers where they put them."""

    def to_meta(module: nn.Module, name: str, leaf: Any) -> Any:
        return None if leaf is None or leaf.is_meta else nn.Parameter(leaf.detach().to("meta"), leaf.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()


def loss_of_task(task: str, call: Callable[..., Any], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(the cross-entropy in nats summed over the labels that are not -100, their number)."""
    if "labels" not in batch:
        raise ValueError(f"the batch has no 'labels'; it has {', '.join(batch)}; labels that are -100 do not count")
    labels = batch["labels"]
    inputs = {name: leaf for name, leaf in batch.items() if name != "labels" or task == "seq2seq"}
    logits = call(**inputs, return_dict=True).logits
    if task == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nats = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=IGNORED)
    return nats, (labels != IGNORED).sum()


WAYS = {"colwise": "columns", "rowwise": "rows"}


def tp_rules(module: Any) -> dict[str, str]:
    """The linear layers that transformers' own plan of tensor parallelism splits, as rules."""
    plan = getattr(module.config, "base_model_tp_plan", None) or {}
    places = {pattern: WAYS[way] for pattern, way in plan.items() if way in WAYS and "*." in pattern}
    return {f"^{re.escape(pattern.rpartition('*.')[2])}$": way for pattern, way in places.items()}


def register_experts() -> None:
    """Give transformers the experts below, by the name "fzero", as its own cannot be traced."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("fzero", compute_experts)


def compute_experts(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The result of a module of experts for tokens x [N, D]: each by its k experts."""
    transposed = experts.is_transposed
    order, inverse, ends = group(ids, experts.num_experts)
    expert = ids.reshape(-1)[order]

    def product(rows: Tensor, name: str) -> Tensor:
        w = getattr(experts, name)
        y = grouped_mm(rows, w if transposed else w.transpose(1, 2), ends)
        return y + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else y

    rows = permute(x, order, inverse)
    hidden = experts._apply_gate(product(rows, "gate_up_proj")) if experts.has_gate else None
    hidden = experts.act_fn(product(rows, "up_proj")) if hidden is None else hidden
    y = product(hidden, "down_proj")
    if getattr(experts, "has_post_expert_norm", False):  # of newer ones
        y = experts.post_expert_norm(y)
    return unpermute(y, weights.to(y.dtype), order, inverse)

"""The Model of a decoder that transformers' own code computes: batches of tokens in, logits out.

Differs from fzero's own models: the logits [B, T, V] are made, attention is PyTorch's, and nothing is fused. What a
token sees is found by computing: embedding and a layer of each kind, with random weights, take a short text with and
without what no token may see. Whatever differs was seen.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fzero.core import graph_tracing
from fzero.core.graph_tracing import Impure
from fzero.core.pytree import Tree
from fzero.core.random_interception import seeded
from fzero.kernels.cross_entropy import counted_tokens, number_of, weighed
from fzero.models.base import Ctx, Loss, Model
from fzero.models.batch import Batch, sums_by_source
from fzero.models.configs import DecoderConfig
from fzero.models.from_module import expect_trainable
from fzero.models.layers import document_positions
from fzero.models.module_functions import Layered, Prepared, layered_model, slashed
from fzero.models.module_layers import CannotSplit, any_numbers, any_rows, differ
from fzero.models.module_rehearsal import first_of
from fzero.models.module_split import LossOf, StackKind, inputs_of
from fzero.models.transformers_module import (
    IN_PYTHON,
    class_of_decoder,
    class_of_scored,
    config_of_text,
    module_of_config,
    tp_rules,
)

BEFORE, TEXT, AFTER = 3, 5, 4  # tokens


def expect_sight(layered: Layered, packed: bool) -> None:
    """Raise ValueError if a token sees what is after it or, packed, another document, or layers take others."""
    if packed:
        expect_sight(layered, False)
    with graph_tracing.outside_transforms(), torch.no_grad(), seeded(0):
        prefix = BEFORE if packed else 0
        tokens = torch.arange(prefix + TEXT + AFTER)[None] % len(vocabulary(layered))
        packed_batch: Batch = {"input_ids": tokens}
        if packed:
            packed_batch["position_ids"] = torch.cat([torch.arange(n) for n in (prefix, TEXT, AFTER)])[None]
        text = slice(prefix, prefix + TEXT)
        segment = first_difference(layered, packed_batch, {"input_ids": tokens[:, text]}, text)
    if not segment:
        return
    if packed:
        raise ValueError(
            f"{layered.name}: {segment} mixes the documents of a row, which transformers is told apart by "
            "position_ids; for text use data.within_documents=false, and for chat data.packing=buckets with it, where "
            "a row has one document; pairs and classes, which share rows, need a decoder that tells documents apart"
        )
    raise ValueError(
        f"{layered.name}: in {segment} a token sees the ones after it, so that it is no decoder{IN_PYTHON}"
    )


def vocabulary(layered: Layered) -> Tensor:
    """The largest matrix outside of the layers."""
    return max((leaf for leaf in layered.parameters.values() if leaf.dim() == 2), key=len)


def first_difference(layered: Layered, packed_batch: Batch, alone: Batch, text: slice) -> str:
    """The part of a decoder in which a text's numbers differ beside others, or ""."""
    ctx = Ctx()
    outside = {name: any_rows(leaf.shape) for name, leaf in layered.parameters.items()}
    pairs = [(batch, layered.prepare(batch, ctx)) for batch in (packed_batch, alone)]
    inputs = [inputs_of(outside, prepared.buffers, batch, ctx) for batch, prepared in pairs]
    x: list[tuple[Tensor, ...]] = [(), ()]
    for stack, layers in layered.stacks.items():
        x = [
            layered.splits[p.split].prologues[stack](i, activations) for (_, p), i, activations in zip(pairs, inputs, x)
        ]
        rows = tuple(packed_batch["input_ids"].shape)
        if x[0][0].shape[:-1] != rows:
            raise ValueError(
                f"{layered.name}: {layers.names[0]} is called with {list(x[0][0].shape)} for tokens {list(rows)}, and "
                f"the activations of a decoder are [B, T, D]{IN_PYTHON}"
            )
        if differ(x[0][0][:, text], x[1][0]):
            return "the embedding" if stack == next(iter(layered.stacks)) else f"what is before {layers.names[0]}"
        sample = torch.randn(x[0][0].shape)
        x = [(sample, *x[0][1:]), (sample[:, text], *x[1][1:])]
        for number, layer in enumerate(layered.templates[stack]):
            kind = StackKind(stack, number)
            index = torch.tensor(layered.firsts[kind])
            params = {name: any_numbers(leaf.shape) for name, leaf in layer.named_parameters()}
            results = []
            for (_, prepared), activations in zip(pairs, x):
                layer_inputs = layered.splits[prepared.split].arguments_of(kind, activations, prepared.side_args)
                leaves = {**params, **layered.layer_buffers(kind, prepared.stacked, index)}
                out = layered.call_layer(kind, leaves, layer_inputs, ctx._replace(layer=index), prepared.rows)
                results.append(first_of(out))
            if differ(results[0][:, text], results[1]):
                return layers.first(number)
    return ""


class Decoder(NamedTuple):
    """A decoder that transformers' own code computes."""

    module: nn.Module  # of its folders; its parameters have no memory
    model: Model  # with a head of scores: the one below it, which has `features`
    sources: dict[str, tuple[str, ...]]  # of each leaf of that model: the parameters, one a layer, that it stacks
    linears: tuple[str, ...]  # the leaves that linear layers within the layers have as weights
    notes: tuple[str, ...]  # what there is to say of it


@dataclass(frozen=True)
class MissingWeight:
    """What a leaf begins with where a run is given no weights: nothing."""

    name: str  # of the parameter

    def __call__(self) -> Tensor:
        raise ValueError(
            f"{self.name} has no first value: a model that transformers' code computes begins with the weights of a "
            "folder: fzero.from_huggingface(FOLDER) (--init FOLDER of a run)"
        )


class Trunk(nn.Module):
    """A module of transformers without its head, with the names that its parameters have beside the head."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.prefix, self.config = module.base_model_prefix, module.config
        self.add_module(self.prefix, getattr(module, self.prefix))

    def forward(self, **inputs: Any) -> Tensor:
        """The activations [B, T, D] after the last norm."""
        return getattr(self, self.prefix)(**inputs, return_dict=True).last_hidden_state


def decoder(config: DecoderConfig) -> Model:
    """The Model of a decoder, which begins with weights that are given."""
    return decoder_of(config).model


def trunk(config: DecoderConfig) -> Model:
    """The Model of a decoder without its head, for one of scores; raises ValueError where transformers has none."""
    return decoder_of(config, 1).model


@functools.lru_cache(maxsize=4)
def decoder_of(config: DecoderConfig, scores: int = 0) -> Decoder:
    """The decoder of a config, with so many scores of a text as its head, 0 for words."""
    source = config.architecture
    theirs = config_of_text(config.text, source)
    cls = class_of_decoder(theirs, {}, source)
    if scores:
        cls, theirs.num_labels = class_of_scored(theirs, source), scores
    expect_sizes(config, theirs)
    module = make_module(theirs, cls)
    module.train(has_dropout(theirs))
    body = trunk_of(module, config) if scores else module
    expect_trainable(body)
    example = {"input_ids": torch.arange(16).reshape(2, 8) % config.vocab_size}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layered, model = decoder_layers(body, example, features_of if scores else logits_of)
    layered.name = source
    functions = Functions(layered)
    sources = {leaf: tuple(read.name for read in start.layers) for leaf, start in model.traits.start.items()}
    model = model._replace(
        config=config,
        prepare=functions.prepare,
        embed=functions.embed,
        join={stack: functools.partial(functions.join, stack) for stack in model.join},
    )
    if scores:
        model = model._replace(features=functions.outputs)
    else:
        ends = {"head": functions.head, "logits": functions.outputs}
        model = model._replace(**ends).with_traits(token_losses=functions.token_losses)
    linears = (f"{stack}/{slashed(name)}/weight" for stack, names in layered.linears.items() for name in names)
    return Decoder(module, model, sources, tuple(linears), tuple(str(warning.message) for warning in caught))


def trunk_of(module: Any, config: DecoderConfig) -> Trunk:
    """A module with a head of scores without that head; raises ValueError for another head."""
    score = getattr(module, "score", None)
    if type(score) is not nn.Linear or score.bias is not None or score.in_features != config.d_model:
        raise ValueError(
            f"{type(module).__name__}: its head is no linear layer `score` of {config.d_model} numbers without bias, "
            f"as those of decoders are{IN_PYTHON}"
        )
    return Trunk(module)


def make_module(theirs: Any, cls: type) -> nn.Module:
    """The module of a config without memory; raises ValueError if its code fails."""
    try:
        return module_of_config(theirs, cls, attention=None, seed=None)
    except Exception as error:  # of somebody else's code
        text = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{cls.__name__}: transformers makes no module of this config.json: {type(error).__name__}: {text}"
        ) from None


def linear_targets(config: DecoderConfig, attention: bool) -> str:
    """The regex of the weights of all linear layers of a decoder's layers, or of its attention alone."""
    names = [name for name in decoder_of(config).linears if not attention or re.search(r"att|/wqkv", name, re.I)]
    if not names:
        every = ", ".join(decoder_of(config).linears)
        raise ValueError(f"on=attn: no linear layer of {config.architecture} is named so; write on=REGEX of {every}")
    return f"^({'|'.join(map(re.escape, names))})$"


def decoder_layers(module: nn.Module, example: Batch, outputs: LossOf) -> tuple[Layered, Model]:
    """The functions of a module's layers and the Model that they are, which ends with these outputs."""
    rules = tp_rules(module) or {"": "auto"}
    try:
        return layered_model(module, outputs, MissingWeight, batch=example, tp=rules, inferred=True)[:2]
    except CannotSplit as reason:
        raise ValueError(
            f"{type(module).__name__} cannot be cut into layers, which a run gathers, keeps and recomputes one by one: "
            f"{reason}; fzero.from_huggingface trains it whole"
        ) from None
    except Impure as error:
        raise ValueError(
            f"{type(module).__name__}: transformers' code of this config.json is no pure function: {error}"
        ) from None


def logits_of(call: Callable[..., Any], batch: Batch) -> Tensor:
    """The logits [B, T, V] of a batch."""
    return call(**batch, return_dict=True).logits


def features_of(call: Callable[..., Any], batch: Batch) -> Tensor:
    """The activations [B, T, D] of a batch after the last norm, of a Trunk."""
    return call(**batch)


def has_dropout(config: Any) -> bool:
    """Whether a config of transformers has a rate of dropout above 0."""
    rates = (value for name, value in config.to_dict().items() if "drop" in name)
    return any(isinstance(value, float) and value > 0.0 for value in rates)


def expect_sizes(config: DecoderConfig, theirs: Any) -> None:
    """Raise ValueError where the sizes of a config differ from those in its text."""
    sizes = {"vocab_size": "vocab_size", "d_model": "hidden_size", "n_layers": "num_hidden_layers"}
    for field, name in sizes.items():
        if getattr(config, field) != getattr(theirs, name):
            raise ValueError(
                f"model.{field} is {getattr(config, field)} and {name} of {config.architecture} "
                f"{getattr(theirs, name)}; its sizes are those of its config.json"
            )


class Functions:
    """The functions of a decoder, of batches of tokens, from those of its module, of its arguments."""

    def __init__(self, layered: Layered) -> None:
        self.layered = layered
        self.checked_kinds: set[bool] = set()  # whether what a token sees is known: with documents, and without

    def prepare(self, batch: Batch, ctx: Ctx) -> Prepared:
        """What the layers need of a batch; the first of a kind checks what a token sees."""
        packed = "documents" in batch
        if packed not in self.checked_kinds:
            expect_sight(self.layered, packed)
            self.checked_kinds.add(packed)
        return self.layered.prepare(arguments(batch), ctx)

    def embed(self, params: Tree, batch: Batch, ctx: Ctx) -> Any:
        """What the first layer is called with."""
        return self.layered.embed(params, arguments(batch), ctx)

    def join(self, stack: str, params: Tree, x: Any, batch: Batch, ctx: Ctx) -> Any:
        """What the first layer of another stack is called with."""
        return self.layered.join(stack, params, x, arguments(batch), ctx)

    def head(self, params: Tree, x: Any, batch: Batch, ctx: Ctx) -> Loss:
        """The cross-entropy of the targets that count, summed."""
        losses, counts = self.token_losses(params, x, batch, ctx), counted_tokens(batch["targets"], batch.get("mask"))
        extra = sums_by_source(batch, losses.detach().reshape(-1), counts.reshape(-1))
        return Loss(losses.sum(), number_of(counts), extra)

    def outputs(self, params: Tree, x: Any, ctx: Ctx) -> Tensor:
        """The logits [B, T, V]; of a Trunk the activations [B, T, D]."""
        return self.layered.result(params, x, {}, ctx)

    def token_losses(self, params: Tree, x: Any, batch: Batch, ctx: Ctx) -> Tensor:
        """The cross-entropy of each target [B, T], in nats and in float32 or wider, times its weight."""
        logits, counts = self.outputs(params, x, ctx), counted_tokens(batch["targets"], batch.get("mask"))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        targets = torch.where(counts.bool(), batch["targets"], 0).long()
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").reshape(targets.shape)
        return weighed(nats, counts)


def arguments(batch: Batch) -> Batch:
    """The arguments of the module's forward pass, with positions that begin at 0 in each document."""
    inputs = {"input_ids": batch["tokens"]}
    if "documents" in batch:
        inputs["position_ids"] = document_positions(batch["documents"])
    return inputs

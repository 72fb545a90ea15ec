"""A model that writes text, with its tokenizer: of a run, or of a folder of another system, at rest on a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero import models
from fzero.core import gpu, pytree
from fzero.core.pytree import Tree
from fzero.data.auto_tokenizer import missing_lines
from fzero.data.tokenizers import Tokenizer
from fzero.generate import Draft
from fzero.models import Model
from fzero.run.config.run_config import RunConfig
from fzero.run.setup import run_folder, vocabulary, weights
from fzero.sharding import Mesh, Plan, digest_text, narrow_to, one_process, zero_plan

GUESSES, GUESSES_OF_HEAD = 4, 2  # at a time, of a draft and of a second head
MTP = "mtp"


class TextModel(NamedTuple):
    """What generates text after prompts."""

    folder: Path
    config: RunConfig
    model: Model
    params: Tree  # at rest as `plan` says
    plan: Plan
    device: torch.device  # on which it computes
    tokenizer: Tokenizer
    ends: tuple[int, ...]  # the ids that end a text
    warnings: list[str]  # lines about checkpoints that were passed over

    @property
    def vocab_size(self) -> int:
        """The ids that are drawn are below it: the model may have more rows than the tokenizer has tokens."""
        return min(self.tokenizer.vocab_size, self.model.config.vocab_size)

    def ids_of(self, content: str | Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The ids of a text to continue, or of messages to answer; raises ValueError without a chat template."""
        encode = vocabulary.text_ids if isinstance(content, str) else vocabulary.message_ids
        return tuple(encode(self.folder, self.tokenizer, content).tolist())  # type: ignore[arg-type]

    def digest(self) -> str:
        """16 hexadecimal digits of the weights; the same on every mesh, whose ranks call it together."""
        return digest_text(self.params, self.plan.params, self.plan.mesh)

    def template_warnings(self) -> list[str]:
        """A line about tokens of the chat template that the tokenizer lacks."""
        remedy = f"fzero finetune --init {self.folder} --add-tokens template"
        return missing_lines(vocabulary.start_chat(self.folder), self.tokenizer, remedy)


def load_text_model(
    folder: Path,
    *,
    ema: bool = False,
    device: torch.device = gpu.HOST,
    mesh: Mesh | None = None,
    offload: str | None = None,
    nvme: str | None = None,
    quantize: str | None = None,
) -> TextModel:
    """The newest sound weights of the run in `folder`, or the model of transformers in it, and its tokenizer.

    ema: the average of a run's weights. mesh: over which they are split; None: they are whole. offload: params=nvme, by
    which they stay on a disk, in the folder `nvme`, and are read layer by layer. quantize: nf4, int4 or int8, in which
    the weights of layers are rounded, in blocks of 64. Raises ValueError where there is no
    model or no tokenizer, and for values that do not go together.
    """
    if offload not in (None, "params=nvme"):
        raise ValueError(f"--offload {offload}: text can offload only parameters; use params=nvme, or leave it out")
    if nvme is not None and offload is None:
        raise ValueError("--nvme needs --offload params=nvme; give that too")
    mesh, of_run = mesh or one_process(), run_folder.is_run(folder) or not folder.is_dir()
    for flag, value in (("--ema", ema), ("--offload", offload)):
        if value and not of_run:
            raise ValueError(f"{flag} is for runs; leave it out, or import the model: fzero import {folder} --out RUN")
    if offload and quantize:
        raise ValueError(f"--quantize {quantize} is for weights in memory; leave --offload {offload} out, or it")
    if offload and mesh.size > 1:
        raise ValueError(f"--offload {offload} is for one process, and here are {mesh.size}; leave it out")
    if offload:
        trained = weights.load_on_disk(folder, nvme, ema=ema)
    else:
        trained = weights.load(folder, ema=ema) if of_run else weights.load_start(folder)
    tokenizer = vocabulary.start_tokenizer(folder)
    model, params = trained.model, trained.params
    if quantize:
        model = models.quantized(model, quantize)
        params = models.quantize_weights(model, params)
    plan = zero_plan(0, model, mesh)
    params = params if mesh.size == 1 else _shards_of(params, plan)
    return TextModel(
        folder,
        trained.config,
        model,
        weights.move_params(device, params),
        plan,
        device,
        tokenizer,
        tuple(vocabulary.stop_ids(folder, tokenizer)),
        trained.warnings,
    )


def guess_options(text_model: TextModel, draft: Path | None, guesses: int | None) -> tuple[dict[str, Any], list[str]]:
    """The fields of GenerateOptions that say how tokens are guessed, and lines about checkpoints of the draft.

    draft: the folder of a smaller model, or "mtp", the second head of the model itself; None: they are guessed from the
    text so far. guesses: at a time; None: 4 with
    a draft, else none. Raises ValueError for a draft of another tokenizer.
    """
    if draft is None:
        return {"guesses": guesses or 0}, []
    if guesses == 0:
        raise ValueError("--guesses is 0 and --draft is there, which guesses; give the tokens to guess at a time, as 4")
    if str(draft) == MTP:
        head = Draft(text_model.model, text_model.params, mtp=True)
        return {"guesses": guesses or GUESSES_OF_HEAD, "draft": head}, []
    small = load_text_model(draft, device=text_model.device)
    pairs = [(t.json or t.name, t.vocab_size) for t in (small.tokenizer, text_model.tokenizer)]
    if pairs[0] != pairs[1]:
        names = [f"{t.name} with {t.vocab_size:,} ids" for t in (small.tokenizer, text_model.tokenizer)]
        raise ValueError(
            f"--draft {draft}: has another tokenizer ({names[0]}) than {text_model.folder} ({names[1]}); give a model "
            "of the same one"
        )
    return {"guesses": guesses or GUESSES, "draft": Draft(small.model, small.params)}, small.warnings


def _shards_of(params: Tree, plan: Plan) -> Tree:
    """This rank's parts of whole parameters, as copies."""
    leaves = plan.leaves
    return pytree.map_named(
        lambda name, leaf: narrow_to(leaf, leaves[name].params, plan.mesh, leaf=name).clone(), params
    )

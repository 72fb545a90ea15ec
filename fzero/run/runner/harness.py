"""A model under lm-evaluation-harness: an adapter of its API, which gives a folder of transformers the numbers of the
harness' own `hf` model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fzero import data
from fzero.core import packages
from fzero.core.text_parsing import short
from fzero.data.chat import encoder, render
from fzero.data.tokenizers import library_of
from fzero.generate import GenerateOptions, Prompt, Sampling, completions
from fzero.generate.continuations import Continuation, score_continuations
from fzero.run.setup import vocabulary
from fzero.run.setup.text_model import TextModel

USE = "fzero evaluate"
MAX_TOKENS = 256  # of a text whose task says nothing, as in the harness


def evaluate_tasks(
    text_model: TextModel,
    tasks: Sequence[str],
    *,
    include: Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    kernels: str = "auto",
) -> dict[str, Any]:
    """The harness' results of tasks: {"results": {task: {metric: value}}, ...}.

    include: a folder of tasks of your own (.yaml). shots: the examples before each question; None: the task's. limit:
    the questions of each task. Raises ValueError where lm-eval is missing, and for a task that it does not have.
    """
    evaluator = packages.load("lm_eval", USE)
    manager = packages.load("lm_eval.tasks", USE).TaskManager(include_path=None if include is None else str(include))
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise ValueError(
            f"--tasks has {short(unknown[0])}, which lm-evaluation-harness does not have; name its tasks, or the folder"
            " of yours by --task-folder"
        )
    model = harness_model(text_model, kernels=kernels)
    calls = {"task_manager": manager, "num_fewshot": shots, "limit": limit, "apply_chat_template": chat}
    return evaluator.simple_evaluate(model=model, tasks=list(tasks), log_samples=False, bootstrap_iters=0, **calls)


def harness_model(text_model: TextModel, *, kernels: str = "auto") -> Any:
    """The model as lm_eval.api.model.TemplateLM; needs the package lm-eval."""
    api, utils = packages.load("lm_eval.api.model", USE), packages.load("lm_eval.utils", USE)
    normalize = packages.load("lm_eval.models.utils", USE).normalize_gen_kwargs
    texts, max_len = TaskTexts(text_model), text_model.model.config.max_len

    class HarnessModel(api.TemplateLM):
        """What the harness asks of a model."""

        eot_token_id, prefix_token_id = texts.end, texts.begin
        tokenizer_name = text_model.tokenizer.name
        apply_chat_template = staticmethod(texts.render)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return texts.encode(string, add_special_tokens)

        def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
            pairs = [(context, ids) for _, context, ids in requests]
            kept = [(*context, *ids)[-(max_len + 1) :] for context, ids in pairs]
            continuations = [
                Continuation(tuple(tokens[: -len(ids)]), tuple(ids)) for tokens, (_, ids) in zip(kept, pairs)
            ]
            calls = {"plan": text_model.plan, "kernels": kernels, "device": text_model.device}
            scores = score_continuations(text_model.model, text_model.params, continuations, **calls)
            # A sum in float32, as the harness' own model has it.
            return [(float(torch.tensor(value.log_probs).sum()), value.greedy) for value in scores]

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            sums = []
            for (text,) in (request.args for request in requests):
                options = {"prefix_token": self.prefix_token_id, "max_seq_len": max_len, "context_len": 1}
                windows = utils.get_rolling_token_windows(token_list=self.tok_encode(text), **options)
                pairs = [(None, *utils.make_disjoint_window(window)) for window in windows]
                sums.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
            return sums

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            prompts = [self.prompt_of(number, *request.args) for number, request in enumerate(requests)]
            limits = {"ends": (*text_model.ends, self.eot_token_id), "device": str(text_model.device)}
            options = GenerateOptions(decode=texts.decode, kernels=kernels, **limits)
            calls = {"plan": text_model.plan, "options": options}
            found = {c.number: c.text for c in completions(text_model.model, text_model.params, prompts, **calls)}
            return [found[number] for number in range(len(prompts))]

        def prompt_of(self, number: int, context: str, settings: dict[str, Any]) -> Prompt:
            """The prompt of a request; raises ValueError for a setting that sampling here does not have."""
            settings = dict(normalize(settings, MAX_TOKENS))
            max_tokens, stop = settings.pop("max_gen_toks"), tuple(filter(None, settings.pop("until", None) or ()))
            drawn = settings.pop("do_sample", False)
            known = {name: settings.pop(name) for name in ("temperature", "top_k", "top_p") if name in settings}
            if settings:
                raise ValueError(
                    f"the task's generation_kwargs have {next(iter(settings))}; known are do_sample, temperature, "
                    "top_k, top_p, until and max_gen_toks"
                )
            if max_tokens >= max_len:
                raise ValueError(f"a task asks for {max_tokens} tokens; max_len of the model is {max_len}: give fewer")
            limits: dict[str, Any] = known if drawn else {"temperature": 0.0}
            sampling = Sampling(**limits, stop=stop, max_tokens=max_tokens)
            return Prompt(tuple(self.tok_encode(context)[-(max_len - max_tokens) :]), sampling, number)

    return HarnessModel()


class TaskTexts:
    """Texts of tasks as ids, and back, as transformers has them for a folder of its own."""

    def __init__(self, text_model: TextModel) -> None:
        self.folder, self.tokenizer = text_model.folder, text_model.tokenizer
        self.ids_of, self.foreign = encoder(self.tokenizer), "token_ids" in vocabulary.start_ids(self.folder)
        self.special = data.special_tokens(self.folder) if self.foreign else {}
        json = self.tokenizer.json
        self.library = library_of(json, self.tokenizer.name) if json else None
        self.end: int = self.token_of("eos_token", self.tokenizer.eos)
        self.begin: int = self.token_of("bos_token", self.end)  # before a text without a context

    def token_of(self, name: str, default: int) -> int:
        """The id of a special token."""
        ids = self.ids_of(self.special[name])[0].tolist() if name in self.special else []
        return ids[0] if len(ids) == 1 else default

    def encode(self, text: str, add_special: bool | None = None) -> list[int]:
        """The ids of a text, with those that the tokenizer puts around one unless it begins with them."""
        begun = "bos_token" in self.special and text.startswith(self.special["bos_token"])
        add_special = self.foreign and not begun if add_special is None else add_special
        return self.ids_of(text, add_special=add_special)[0].tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        if self.library is None:
            return self.tokenizer.decode(ids)
        return self.library.decode(list(ids), skip_special_tokens=True)

    def render(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; raises ValueError without a chat template."""
        template = vocabulary.start_chat(self.folder)
        if template is None:
            raise ValueError(f"{self.folder}: has no chat template (chat_template.jinja); leave out --chat-questions")
        return render(template, chat_history, prompt=add_generation_prompt)

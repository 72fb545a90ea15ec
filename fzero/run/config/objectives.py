"""The objectives of a run as values: what each learns from, its loss and its head, the numbers of its fine-tuning.

A command reads the table before it imports torch: the methods import what they use.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fzero.data.chat import Chat
    from fzero.data.examples import Lengths
    from fzero.data.tokenizers import Tokenizer
    from fzero.models import Model, ModelConfig


class Lines(NamedTuple):
    """A .jsonl file to prepare, and the model that learns from it."""

    path: Path
    out: Path  # the folder of the corpus
    init: Path  # where the model comes from
    chat: Chat | None
    tokenizer: Tokenizer
    lengths: Lengths
    seed: int
    head: Any  # the ScoreConfig of the model; None: it has none


@dataclass(frozen=True)
class Objective:
    """What is learnt. `OBJECTIVES[name] = Kind(name, ...)` is all that a run needs of another one."""

    name: str
    corpus: str  # the kind of corpus that it learns from
    line: str  # what a line of its .jsonl file is
    unit: str  # the loss is in nats per unit
    rates: tuple[float, ...] = ()  # peak learning rates of a fine-tuning: of whole weights, of LoRA's factors
    head: str = ""  # of the scores that the model has, in words
    examples: bool = True  # it learns from examples, each whole in a row; not of text, whose rows are cut anywhere
    of_tokens: bool = False  # its loss is the mean of the tokens that count
    reports: bool = False  # its loss has further means to report of a validation, such as accuracy
    reference: bool = False  # it compares with the model that the run starts from

    @property
    def preset(self) -> str:
        """The name of its fine-tuning."""
        return "finetune" if self.of_tokens else f"finetune-{self.name}"

    def with_loss(self, config: Any, model: Model) -> Model:
        """The model with the loss of what is learnt."""
        return model

    def prepare(self, lines: Lines) -> tuple[dict[str, Any], list[str]]:
        """(the content of the prepared corpus' meta.json, lines to say about it)."""
        raise NotImplementedError

    def with_head(self, model: Model, pad: int, path: str | None) -> Model:
        """The model with the head of scores that is trained. path: of the data, if it is given."""
        return model


class Conversations(Objective):
    """What the assistant says."""

    def prepare(self, lines: Lines) -> tuple[dict[str, Any], list[str]]:
        """As that of every objective; raises ValueError for a model without a chat template."""
        from fzero.data.examples import prepare_conversations

        if lines.chat is None:
            raise ValueError(
                f"{lines.init}: has no chat template (chat_template.jinja, or an entry of tokenizer_config.json); give "
                "one: --chat-template FILE.jinja"
            )
        return prepare_conversations(lines.path, lines.out, lines.chat, lines.tokenizer, lines.lengths, lines.seed), []


class Preferences(Objective):
    """To prefer an answer to another one, by direct preference optimization."""

    def with_loss(self, config: Any, model: Model) -> Model:
        """The model with the loss of fzero.models.dpo."""
        from fzero import models

        return models.dpo(model, config.dpo.beta, config.dpo.smoothing)

    def prepare(self, lines: Lines) -> tuple[dict[str, Any], list[str]]:
        """As that of every objective; pairs of texts need no template."""
        from fzero.data.preferences import prepare_preferences

        return prepare_preferences(lines.path, lines.out, lines.chat, lines.tokenizer, lines.lengths, lines.seed), []


class Classes(Objective):
    """The classes of texts, by a head of scores."""

    def prepare(self, lines: Lines) -> tuple[dict[str, Any], list[str]]:
        """As that of every objective, with a line of how many texts each class has."""
        from fzero.data.preferences import expect_label_coverage, labels_reader

        labels = lines.head.labels
        read = labels_reader(lines.chat, lines.tokenizer, lines.lengths, labels, lines.head.pad)
        return prepare_scored(self.corpus, lines, read), [expect_label_coverage(lines.path, lines.out, labels)]

    def with_head(self, model: Model, pad: int, path: str | None) -> Model:
        """The model with a score for each label of the data."""
        from fzero import models
        from fzero.data.preferences import labels_of

        if not path:
            raise ValueError("objective is classify, whose labels come from the data; give data.path")
        return models.classify(model, labels_of(Path(path)), pad)


class Rewards(Objective):
    """A score for answers."""

    def prepare(self, lines: Lines) -> tuple[dict[str, Any], list[str]]:
        """As that of every objective."""
        from fzero.data.preferences import ranked_reader

        read = ranked_reader(lines.chat, lines.tokenizer, lines.lengths, lines.head.pad)
        return prepare_scored(self.corpus, lines, read), []

    def with_head(self, model: Model, pad: int, path: str | None) -> Model:
        """The model with one score."""
        from fzero import models

        return models.reward(model, pad)


def prepare_scored(kind: str, lines: Lines, read: Any) -> dict[str, Any]:
    """Prepare the examples of a head of scores, which `read` reads."""
    from fzero.data.examples import LineReader, prepare_examples

    reader = LineReader(read, lines.lengths.too_long)
    labels = lines.head.labels
    return prepare_examples(
        lines.path, lines.out, kind, reader, lines.chat, lines.tokenizer, seed=lines.seed, labels=labels
    )


TEXT = Objective("text", "text", "text", "token", examples=False, of_tokens=True)
# LoRA's factors take larger rates than whole weights (Schulman et al. 2025, "LoRA without regret"), and preferences
# smaller ones than texts (Rafailov et al. 2023, appendix B, has 1e-6).
CHAT = Conversations("chat", "chat", "conversation", "token", (2e-5, 2e-4), of_tokens=True)
OBJECTIVES: dict[str, Objective] = {
    objective.name: objective
    for objective in (
        TEXT,
        CHAT,
        Preferences("dpo", "pairs", "pair of answers", "pair", (1e-6, 1e-5), reports=True, reference=True),
        Classes("classify", "labels", "text with its label", "text", (2e-5, 2e-4), "classes", reports=True),
        Rewards("reward", "ranked", "pair of answers", "pair", (1e-5, 1e-4), "a reward", reports=True),
    )
}


def objective_named(name: Any) -> Objective:
    """The objective of a name that a user wrote; chat for an unknown one."""
    return next((objective for objective in OBJECTIVES.values() if objective.name == name), CHAT)


def objective_of(model: ModelConfig) -> Objective:
    """The objective of a model's head of scores; text if it has none."""
    from fzero.models.configs import head_of

    head = head_of(model)
    words = "" if head is None else "classes" if head.labels else "a reward"
    return next(objective for objective in OBJECTIVES.values() if objective.head == words)


def fine_tuning_presets() -> dict[str, tuple[Objective, float]]:
    """{preset of a run that begins with the weights of another: its objective, its peak learning rate}.

    >>> fine_tuning_presets()["finetune-dpo-lora"][1]
    1e-05
    """
    return {
        objective.preset + suffix: (objective, rate)
        for objective in OBJECTIVES.values()
        for suffix, rate in zip(("", "-lora"), objective.rates)
    }


def unit_of(objective: str | None) -> str:
    """The unit of an objective's loss, as recorded in a config.

    >>> unit_of("dpo"), unit_of(None)
    ('pair', 'token')
    """
    return OBJECTIVES.get(objective or TEXT.name, TEXT).unit

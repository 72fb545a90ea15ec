"""Stages of a run: steps with a length of sequences, and what goes with it, of their own.

A config has the values of the last stage, and in `stages` a text for each one before it: its last step, and how it
differs from the stage after it, such as "1000: data.seq_len=8192 train.batch=512 train.micro_batch=8". So the values
and data of step i are a function of the config and i. With `train.batch_ramp` a stage is several, one for each size of
its batches, which grow with the tokens of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from fzero.core.config_tables import Table
from fzero.core.pytree import nearest
from fzero.kernels.rope_scaling import RopeScaling

RAMP_FORM = "a ramp is START:INCREMENT:TOKENS, such as 16:16:1e8: 16 at first, and 16 more each 1e8 tokens"
MAX_SIZES = 1000  # sizes on the way, each with steps of its own


class Ramp(NamedTuple):
    """Batches of `start` sequences, and `increment` more after each `tokens` tokens, up to the config's."""

    # Ref: Smith et al. 2022, "Using DeepSpeed and Megatron to train Megatron-Turing NLG 530B", arXiv:2201.11990,
    # section 3.2, whose ramp is by samples.
    start: int
    increment: int
    tokens: int

    @classmethod
    def parse(cls, text: str, key: str = "train.batch_ramp") -> Ramp:
        """The Ramp of a text, the value of `key`; raises ValueError.

        >>> Ramp.parse("16:8:1e6")
        Ramp(start=16, increment=8, tokens=1000000)
        """
        parts, numbers = text.split(":"), list[int]()
        for field in parts:
            try:
                value = float(field)
            except ValueError:
                raise ValueError(f"{key} is {text!r}: {field!r} is no number; {RAMP_FORM}") from None
            if not (math.isfinite(value) and value >= 1 and value == int(value)):
                raise ValueError(f"{key} is {text!r}: {field} is no whole number of at least 1; {RAMP_FORM}")
            numbers.append(int(value))
        if len(numbers) != 3:
            raise ValueError(f"{key} is {text!r}; {RAMP_FORM}")
        return cls(*numbers)

    def expect_fits(self, batch: int, micro_batch: int) -> None:
        """Raise ValueError if the ramp does not lead to `batch` by micro-batches."""
        text = ":".join(map(str, self))
        if self.start > batch:
            raise ValueError(
                f"train.batch_ramp is {text}, which begins above train.batch={batch}; batches grow: begin with less"
            )
        if (batch - self.start) % self.increment:
            near = self.start + (batch - self.start) // self.increment * self.increment
            raise ValueError(
                f"train.batch_ramp is {text}, whose steps of {self.increment} do not lead from {self.start} to "
                f"train.batch={batch}; use --batch {near} or {near + self.increment}, or another increment"
            )
        for role, size in (("begins with", self.start), ("grows by", self.increment)):
            if size % micro_batch and (role != "grows by" or self.start < batch):
                raise ValueError(
                    f"train.batch_ramp is {text}, which {role} {size} sequences, and train.micro_batch={micro_batch} "
                    "does not divide that; make one fit the other"
                )
        if (sizes := (batch - self.start) // self.increment) > MAX_SIZES:
            raise ValueError(
                f"train.batch_ramp is {text}, which has {sizes:,} sizes on its way to train.batch={batch}; use an "
                f"increment of at least {-(-(batch - self.start) // MAX_SIZES)}"
            )

    def pieces(
        self, batch: int, seq_len: int, past_tokens: int, steps: int, sequences: int = 0
    ) -> list[tuple[int, int]]:
        """[(a batch, steps of it)] of so many steps up to `batch`, after `past_tokens` tokens of the run.

        >>> Ramp(2, 1, 40).pieces(4, 10, 0, 6)
        [(2, 2), (3, 2), (4, 2)]
        """
        segments, last = list[tuple[int, int]](), (batch - self.start) // self.increment
        while steps:
            level = min(past_tokens // self.tokens, last)
            size = self.start + level * self.increment
            count, of_step = steps, (sequences or size) * seq_len
            if level < last:
                count = min(steps, -(-((level + 1) * self.tokens - past_tokens) // of_step))
            segments.append((size, count))
            past_tokens, steps = past_tokens + count * of_step, steps - count
        return segments


def shared_batch(batch: int, ramp: str) -> int:
    """The largest number that divides every batch of a run."""
    if not ramp:
        return batch
    parsed = Ramp.parse(ramp)
    return batch if parsed.start == batch else math.gcd(parsed.start, parsed.increment)


RunConfig = Any  # fzero.run.config.run_config.RunConfig, whose module imports this one

# What a stage may have of its own, and how its text is read.
STAGED: dict[str, Callable[[str], Any]] = {
    "data.seq_len": int,
    "data.packing": str,
    "train.batch": int,
    "train.micro_batch": int,
    "model.max_len": int,
    "model.rope_theta": float,
    "model.rope_scaling": RopeScaling.parse,
}
LINKED_KEYS = (("data.seq_len", "model.max_len"), ("train.batch", "train.micro_batch"))  # a text has both, or none


class Stage(NamedTuple):
    """A stage of a run."""

    begin: int  # steps made before it
    end: int  # steps made after it
    written: RunConfig  # of a run whose last stage it is, with the largest of its batches
    batch: int
    ltd_tokens: int = 0  # tokens of a sequence that layers in the middle compute; 0: as written
    # In the rows of the stage before it, of which it has the length and all but the batch and the tokens kept.
    reads_on: bool = False

    @property
    def config(self) -> RunConfig:
        """The config of a run whose last stage it is."""
        c, overrides = self.written, {}
        overrides |= {"train.batch": self.batch} if self.batch != c.train.batch else {}
        overrides |= {"train.random_ltd": self.ltd_tokens} if self.ltd_tokens else {}
        return with_values(c, overrides, c.stages) if overrides else c

    @property
    def samples(self) -> int:
        """The samples that its steps consume."""
        return (self.end - self.begin) * self.batch

    @property
    def tokens(self) -> int:
        """The positions of those."""
        return self.samples * self.written.data.seq_len


def stages_of(config: RunConfig) -> list[Stage]:
    """The stages of a run, the first one first; raises ValueError for a text that is none."""
    stages, t = written_stages(config), config.train
    if t.batch_ramp:
        ramp = Ramp.parse(t.batch_ramp)
        stages = cut_stages(stages, lambda s, *bounds: ramp.pieces(s.batch, s.written.data.seq_len, *bounds), "batch")
    if t.random_ltd_ramp:
        ltd_ramp = Ramp.parse(t.random_ltd_ramp)

        def pieces(stage: Stage, past_tokens: int, steps: int) -> list[tuple[int, int]]:
            seq_len = stage.written.data.seq_len
            max_tokens = stage.written.train.random_ltd or seq_len
            segments = ltd_ramp.pieces(max_tokens, seq_len, past_tokens, steps, stage.batch)
            return [(0 if size == max_tokens else size, count) for size, count in segments]

        stages = cut_stages(stages, pieces, "ltd_tokens")
    return stages


def cut_stages(
    stages: list[Stage], pieces: Callable[[Stage, int, int], list[tuple[int, int]]], field: str
) -> list[Stage]:
    """The stages in pieces, as `pieces`(a stage, tokens before it, its steps) gives them."""
    tokens, out = 0, list[Stage]()
    for stage in stages:
        begin = stage.begin
        for value, steps in pieces(stage, tokens, stage.end - begin):
            continues = stage.reads_on or begin > stage.begin
            out.append(stage._replace(begin=begin, end=begin + steps, reads_on=continues, **{field: value}))
            begin, tokens = begin + steps, tokens + out[-1].tokens
    return out


def written_stages(config: RunConfig) -> list[Stage]:
    """The stages of a run as its config writes them, each with the largest of its batches."""
    ends = ends_of(config)
    configs = [config]
    for i in range(len(config.stages) - 1, -1, -1):
        configs.insert(0, with_values(configs[0], read_stage(config.stages[i])[1], config.stages[:i]))
    return [
        Stage(begin, end, stage_config, stage_config.train.batch)
        for begin, end, stage_config in zip([0, *ends], ends, configs)
    ]


def ends_of(config: RunConfig) -> list[int]:
    """The last step of each stage that a config writes; raises ValueError if they do not rise."""
    ends = [*(read_stage(text)[0] for text in config.stages), config.train.steps]
    for start, end in pairwise([0, *ends]):
        if not start < end:
            raise ValueError(
                f"stages end after the steps {', '.join(map(str, ends))}, the last by train.steps; each must be above "
                "the one before"
            )
    return ends


def expect_stages(config: RunConfig) -> None:
    """Raise ValueError for a text that is no stage, ends that do not rise, and values that do not fit."""
    ends_of(config)
    current = config
    for text in reversed(config.stages):
        current = with_values(current, read_stage(text)[1], ())


def stage_of_step(config: RunConfig, step: int) -> Stage:
    """The stage that makes the step after `step` steps; the last one where all are made."""
    stages = stages_of(config)
    return next((stage for stage in stages if step < stage.end), stages[-1])


def count_tokens(config: RunConfig, step: int) -> int:
    """The positions of all batches of the first `step` steps."""
    stages = stages_of(config)
    return sum(stage._replace(end=max(stage.begin, min(stage.end, step))).tokens for stage in stages)


def token_rates(config: RunConfig) -> list[tuple[int, int]]:
    """(steps before it, the tokens of a step of it) of each stage."""
    return [(stage.begin, stage.batch * stage.written.data.seq_len) for stage in stages_of(config)]


def count_samples(config: RunConfig, step: int) -> int:
    """The samples that the first `step` steps consume: `state.data_cursor` after them."""
    return sum(stage._replace(end=max(stage.begin, min(stage.end, step))).samples for stage in stages_of(config))


def change_stage(config: RunConfig, values: Table, step: int) -> RunConfig:
    """The config of a run whose steps after `step` have other values, by their dotted names.

    >>> from fzero.run.config.config_table import from_table
    >>> config = change_stage(from_table({"preset": "llama-tiny"}), {"data.seq_len": 128}, 40)
    >>> config.data.seq_len, config.stages
    (128, ('40: data.seq_len=256 model.max_len=1024',))
    >>> stage_of_step(config, 39).config.data.seq_len, stage_of_step(config, 40).config.data.seq_len
    (256, 128)
    """
    written = written_stages(config)
    current = next((stage for stage in written if step < stage.end), written[-1]).config
    new = with_values(current, values, ())
    current_values, next_values = staged(current), staged(new)
    changed_keys = {key for key, value in current_values.items() if value != next_values[key]}
    if not changed_keys:
        return current
    stages = current.stages
    if stages and read_stage(stages[-1])[0] == step:  # it would have no step
        return change_stage(written_stages(current)[-2].config, next_values, step)
    changed_keys |= {key for keys in LINKED_KEYS if changed_keys & set(keys) for key in keys if key in current_values}
    text = " ".join(
        f"{key}={'none' if current_values[key] is None else current_values[key]}"
        for key in current_values
        if key in changed_keys
    )
    return replace(new, stages=(*stages, f"{step}: {text}") if step else ())


def staged(config: RunConfig) -> Table:
    """The values of a config that a stage may have of its own, by their dotted names."""
    parts = {key: key.split(".") for key in STAGED}
    return {key: getattr(getattr(config, a), b) for key, (a, b) in parts.items() if hasattr(getattr(config, a), b)}


def with_values(config: RunConfig, values: Mapping[str, Any], stages: tuple[str, ...]) -> RunConfig:
    """The config with other values, by their dotted names, and these stages before it."""
    tables: dict[str, Table] = {}
    for key, value in values.items():
        name, _, field = key.partition(".")
        if not hasattr(getattr(config, name), field):
            raise ValueError(f"{key} is {value} and the model has no {field}; leave it out")
        tables.setdefault(name, {})[field] = value
    return replace(
        config, stages=stages, **{name: replace(getattr(config, name), **table) for name, table in tables.items()}
    )


def read_stage(text: str) -> tuple[int, Table]:
    """(the last step, the values by their dotted names) of the text of a stage; raises ValueError.

    >>> read_stage("40: data.seq_len=128 model.rope_scaling=none")
    (40, {'data.seq_len': 128, 'model.rope_scaling': None})
    """
    end, colon, body = text.partition(":")
    if not colon or not end.strip().isdecimal():
        raise ValueError(f"stages has {text!r}; a stage is its last step and its values, such as '40: data.seq_len=64'")
    values: Table = {}
    for word in body.split():
        key, _, value = word.partition("=")
        if word == "data.packing=buckets":
            raise ValueError(f"stages has {text!r}; buckets are of a whole run, from its first step to its last")
        if key not in STAGED:
            raise ValueError(f"stages has {key!r}{nearest(key, STAGED)}; a stage has {', '.join(STAGED)}")
        try:
            values[key] = STAGED[key](value)
        except ValueError as error:
            raise ValueError(f"stages has {word!r}: {error}") from None
    return int(end), values


def split_changes(changes: Table) -> tuple[Table, Table]:
    """(the values that make a stage, by dotted names; the rest, a table)."""
    stage_values, remainder = {}, {}
    for name, value in changes.items():
        inner = value if isinstance(value, dict) else {}
        for key in [key for key in inner if f"{name}.{key}" in STAGED]:
            stage_values[f"{name}.{key}"] = inner[key]
        fields = {key: v for key, v in inner.items() if f"{name}.{key}" not in STAGED}
        if fields or not isinstance(value, dict):
            remainder[name] = fields if isinstance(value, dict) else value
    return stage_values, remainder

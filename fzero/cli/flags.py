"""The flags that set the config of a run, for every command that takes one, and their conversion to a RunConfig.

Numbers outside of their bounds are refused while a command line is parsed, before any file is opened, and so are flags
that do nothing without something else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fzero.core.config_tables import COUNT, LENGTH, MEMORY_GB, SEED, STAGE, Bounds, check_bounds
from fzero.core.text_parsing import environment_number, short


class Flag(click.Option):
    """An option that does nothing without another one, or without something of what the command works on."""

    def __init__(self, *args: Any, needs: str, of: Callable[..., bool] | None = None, **options: Any):
        super().__init__(*args, **options)
        self.needs, self.of = needs, of

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """As of every option; then raises ValueError if what this one needs is not given."""
        result = super().handle_parse_result(ctx, opts, args)
        if self.of is None and self.name in opts:
            (needed,) = (param.name for param in ctx.command.params if self.needs in param.opts)
            if needed not in opts:
                raise ValueError(self.idle())
        return result

    def idle(self) -> str:
        """The error of the flag without what it needs."""
        return f"{self.opts[0]} is for {self.needs}; add that, or leave it out"


def refuse_idle(*facts: Any) -> None:
    """Raise ValueError for a flag that does nothing with these facts, such as a config."""
    context = click.get_current_context()
    for option in context.command.params:
        explicit = context.get_parameter_source(option.name or "") is click.core.ParameterSource.COMMANDLINE
        if isinstance(option, Flag) and option.of is not None and explicit and not option.of(*facts):
            raise ValueError(option.idle())


class Number(click.ParamType):
    """The type of an option: a number of this kind, within these bounds (fzero/core/arguments.py).

    >>> Number(int, (1, True, 8)).convert("3", None, None)
    3
    >>> Number(float, (0.0, False, 1.0)).convert("nan", None, None)
    Traceback (most recent call last):
    ValueError: the number is nan; it must be above 0 and below 1
    """

    def __init__(self, kind: type[int] | type[float], bounds: Bounds):
        self.parse = click.INT if kind is int else click.FLOAT
        self.name, self.bounds = self.parse.name, bounds

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number of a text; raises ValueError naming the flag for one that is out of bounds."""
        number = self.parse.convert(value, param, ctx)
        check_bounds(param.opts[0] if param else "the number", number, self.bounds)
        return number


FOLDER = click.Path(path_type=Path)
# Options of several commands.
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON in place of text.")
EMA = click.option("--ema", is_flag=True, help="Use the moving average of the weights.")
PARAMS_ON_DISK = (
    click.option(
        "--offload",
        metavar="WHERE",
        help="The memory of params, grads, opt and acts. Here params=nvme, for models larger than memory.",
    ),
    click.option(
        "--nvme",
        metavar="DIR",
        help="The folder for state offloaded to a disk. Default: nvme-sample/ in the run folder.",
    ),
)
GUESSES = (
    click.option(
        "--draft",
        type=FOLDER,
        metavar="FOLDER",
        help="A smaller model of the same tokenizer that guesses tokens, which changes no text; or mtp, the second "
        "head of a DeepSeek.",
    ),
    click.option(
        "--guesses",
        type=Number(int, COUNT),
        help="Tokens to guess at a time: by --draft, or from the text so far. Default: 4 by a model, 2 by mtp, else 0.",
    ),
)
QUANTIZE = click.option(
    "--quantize", metavar="KIND", help="Have weights of layers in nf4, int4 or int8. Default: as they are."
)
RUNS_DEVICE = click.option("--device", help="The device to compute on. auto, cpu or cuda; default: the run's own.")


# {argument of a flag that sets a value of the config: the key}
SHORTHANDS: dict[str, str] = {}


def key_flag(flag: str, key: str, **options: Any) -> Callable[..., Any]:
    """The option of a flag that sets a key of the config."""
    SHORTHANDS[flag.partition("/")[0].strip("-").replace("-", "_")] = key
    return click.option(flag, **options)


DEVICE = key_flag(
    "--device", "device", help="The device to compute on. auto (the default: the GPU where there is one), cpu or cuda."
)
MODEL = key_flag(
    "--model",
    "preset",
    metavar="PRESET",
    help="A preset: llama-tiny (the default), gpt2-124m, mixtral-tiny, ...; or a config.json of Hugging Face.",
)
FILES = (
    click.option(
        "--config",
        "config_file",
        type=FOLDER,
        metavar="RUN.TOML",
        help="A file of values that differ from the preset, or a run's config.json.",
    ),
    click.option(
        "--deepspeed",
        type=FOLDER,
        metavar="DS.JSON",
        help="A config of DeepSpeed, for what it says of batch, optimizer, schedule, precision, stage and offload.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="A.B=C",
        help="One value of the config, such as optim.name=muon. Repeatable.",
    ),
)
TEXT = key_flag(
    "--data",
    "data.path",
    metavar="PATH",
    help="What to learn from. A prepared corpus, a text file, a folder of text, or stdlib (the default).",
)
MIXTURE = key_flag(
    "--mixture",
    "data.mixture",
    metavar="SOURCES",
    help="Prepared corpora by weights: web=corpora/web:0.7,code=corpora/code:0.3:epochs=2.",
)
CONVERSATIONS = key_flag(
    "--data",
    "data.path",
    metavar="PATH",
    help="What to learn from. Conversations, one a line: its messages, each with role and content. For dpo pairs: "
    "prompt, chosen and rejected.",
)


def on_ranks(config: Any, device: Any = None) -> bool:
    """Whether a run has several ranks."""
    return math.prod(config.mesh.values()) > 1 or (not config.mesh and environment_number("WORLD_SIZE", 1, 1) > 1)


VALUES = (
    DEVICE,
    key_flag("--steps", "train.steps", type=int, help="The steps of the whole run, which determine the schedule."),
    key_flag("--batch", "train.batch", type=int, help="The sequences in a step."),
    key_flag(
        "--batch-ramp",
        "train.batch_ramp",
        metavar="START:INCREMENT:TOKENS",
        help="A batch that grows to that of --batch: 16:16:1e8 begins with 16 and adds 16 each 1e8 tokens.",
    ),
    key_flag(
        "--micro-batch", "train.micro_batch", type=int, help="The sequences computed at a time; a divisor of the batch."
    ),
    key_flag("--seq-len", "data.seq_len", type=Number(int, LENGTH), help="The tokens in a sequence."),
    key_flag(
        "--packing",
        "data.packing",
        help="How documents fill sequences: stream (end to end), best-fit (whole, what is left filled up); of a run "
        "also buckets (each in a row of its own, batches by length).",
    ),
    key_flag("--rope-theta", "model.rope_theta", type=float, help="The base of the wavelengths of RoPE."),
    key_flag(
        "--rope-scaling",
        "model.rope_scaling",
        help="The scaling of RoPE: linear:FACTOR, llama3 or yarn:FACTOR:LENGTH with the length before it, or none.",
    ),
    key_flag("--lr", "optim.lr", type=float, help="The peak learning rate."),
    key_flag(
        "--seed",
        "train.seed",
        type=Number(int, SEED),
        help="The seed of all random numbers. They decide parameters, dropout and the order of the data.",
    ),
    key_flag("--precision", "precision.policy", help="The dtypes: auto, fp32, bf16, fp16 or fp64."),
    key_flag("--remat", "train.remat", help="What the backward pass recomputes: none, full, every:K or selective:F."),
    key_flag(
        "--update",
        "train.update",
        metavar="WHEN",
        help="When parameters are updated: end (of a step), backward, speculate; or delayed, with other numbers.",
    ),
    click.option(
        "--mesh",
        help="The sizes of the axes dp, rp, tp, pp, cp, ep. For example dp=2,tp=2. Default: dp over all processes.",
    ),
    key_flag("--zero", "zero", type=Number(int, STAGE), help="The ZeRO stage, 0 to 3."),
    key_flag(
        "--reduce",
        "reduce",
        cls=Flag,
        needs="several ranks, by torchrun or --mesh",
        of=lambda config, device=None: config.reduce != "once" or on_ranks(config),  # canonical sums go on elsewhere
        help="How ranks sum gradients: fast, once (whole over micro-batches first), canonical (alike on every mesh).",
    ),
    key_flag(
        "--sequence/--no-sequence",
        "sequence",
        default=None,
        help="Split activations over tp along the sequence.",
    ),
    key_flag(
        "--context",
        "context",
        metavar="FORM",
        help="Attention over cp: gather, ulysses, ring, hierarchical, hierarchical/2; auto: by what each sends, holds.",
    ),
    key_flag(
        "--experts",
        "experts",
        metavar="FORM",
        help="How tokens come to experts over ep: gather, exchange, exchange:SLACK[:PARTS]; or auto, the default.",
    ),
    key_flag(
        "--codec",
        "codec",
        cls=Flag,
        needs="several ranks, by torchrun or --mesh",
        of=on_ranks,
        metavar="CODES",
        help="What travels in codes of few bytes: params=int8,grads=int4,hpz,loco. Default: nothing.",
    ),
    key_flag(
        "--schedule",
        "pipeline.schedule",
        help="The order of a pipeline's passes, with pp: gpipe, 1f1b, zb-v, ..., or the path of a table (.txt).",
    ),
    key_flag(
        "--chunks",
        "pipeline.chunks",
        type=int,
        help="The stages of a rank of pp: more for interleaved ones; else as the schedule has.",
    ),
    key_flag("--layout", "pipeline.layout", help="The layers of each stage, such as 8,9,9,6; cost: by their times."),
    key_flag("--prefetch", "prefetch", type=int, help="The number of layers that stage 3 gathers ahead of use."),
    key_flag(
        "--resident",
        "resident",
        type=int,
        help="The stages of a rank that stay whole between micro-batches; without pp 1 is all.",
    ),
    key_flag(
        "--offload",
        "offload",
        metavar="WHERE",
        help="The memory of params, grads, opt and acts. For example params=nvme,opt=nvme,acts=host.",
    ),
    key_flag(
        "--nvme",
        "nvme.folder",
        metavar="DIR",
        help="The folder for state offloaded to a disk. Default: nvme/ in the run folder.",
    ),
    key_flag(
        "--buffer-mb",
        "nvme.buffer_mb",
        type=int,
        help="The memory for transfers to and from the disk. Default: as much as the plan needs.",
    ),
    key_flag(
        "--host-memory",
        "host_memory_gb",
        type=Number(float, MEMORY_GB),
        metavar="GB",
        help="The memory of this host that the run may count on. Default: what the system says is available.",
    ),
)


def config_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags of a config to `command`, which gets `config_file`, `settings`, `mesh` and SHORTHANDS."""
    return add_flags(command, (MODEL, *FILES, TEXT, MIXTURE, *VALUES))


def tuning_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags of a run that fine-tunes a model, as `config_flags` does; the model is no argument."""
    return add_flags(command, (*FILES, CONVERSATIONS, *VALUES))


def add_flags(command: Callable[..., Any], options: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Add options to a command, the first one first in its help."""
    for option in reversed(options):
        command = option(command)
    return command


def table_of(
    config_file: Path | None, settings: tuple[str, ...], mesh: str | None, flags: dict[str, Any]
) -> dict[str, Any]:
    """The config table of the flags: the files, changed by --set, changed by the other flags."""
    from fzero.cli import name_checks
    from fzero.core import config_tables
    from fzero.run.config.config_versions import current_keys

    table = config_tables.read_table(config_file) if config_file else {}
    table = current_keys(table) if is_written(config_file) else table
    sizes = parse_mesh(mesh) if mesh else table.get("mesh", {})
    conversion = None
    if flags.get("deepspeed") is not None:
        from fzero.run.config.deepspeed import merge_tables, read_deepspeed

        conversion = read_deepspeed(flags["deepspeed"], ranks_of(sizes))
        for key in sorted(dict(config_tables.flat(table)).keys() & dict(config_tables.flat(conversion.table)).keys()):
            raise ValueError(
                f"--config {config_file} and --deepspeed {conversion.name} both set {key}; leave one of them out"
            )
        say_once(conversion.ignored_line)
        table = merge_tables(conversion.table, table)
    flag_of: dict[str, str] = {}

    def set_value(flag: str, key: str, value: Any) -> None:
        for previous_key, previous_flag in flag_of.items():
            if f"{key}.".startswith(f"{previous_key}.") or f"{previous_key}.".startswith(f"{key}."):
                raise ValueError(
                    f"{flag} and {previous_flag} both set {max(key, previous_key, key=len)}; give one of them"
                )
        flag_of[key] = flag
        config_tables.set_nested(table, key, value)

    for setting in settings:
        set_value(f"--set {setting}", *config_tables.parse_setting(setting))
    for name, key in SHORTHANDS.items():
        if flags.get(name) is not None:
            set_value(
                f"--{name.replace('_', '-')}", key, scaling_of(flags[name]) if name == "rope_scaling" else flags[name]
            )
    for axis, size in sizes.items() if mesh else ():
        set_value("--mesh", f"mesh.{axis}", size)
    if str(table.get("preset", "")).endswith("config.json"):
        table |= {"preset": "", "model": sizes_of_hf(Path(table["preset"])) | table.get("model", {})}
    name_checks.expect_names(table)
    precision = table.get("precision", {})
    explicit_scale = any(key.startswith("precision.loss_scale") for key in flag_of)
    if conversion is not None and precision.get("policy") != "fp16" and not explicit_scale:
        # A loss scale of the file is for its fp16.
        table = {**table, "precision": {name: x for name, x in precision.items() if name != "loss_scale"}}
    if conversion is not None and flags.get("init") is None:  # whose recipe has one rate
        table = conversion.complete(table, say_once)
    return table


def say_once(line: str) -> None:
    """Print a line, if it has words, to the errors of the first rank."""
    if line and environment_number("RANK", 0) == 0:
        click.echo(line, err=True)


def scaling_of(text: str) -> dict[str, Any] | None:
    """The value of model.rope_scaling that a text of --rope-scaling says."""
    from fzero.kernels.rope_scaling import RopeScaling

    scaling = RopeScaling.parse(text)
    return None if scaling is None else dataclasses.asdict(scaling)


def ranks_of(mesh: dict[str, int]) -> int:
    """The data-parallel ranks of a mesh; without one, all processes."""
    return mesh.get("dp", 1) * mesh.get("rp", 1) if mesh else environment_number("WORLD_SIZE", 1, 1)


def is_written(config_file: Path | None) -> bool:
    """Whether a file of `--config` is one that fzero wrote: the config.json of a run."""
    return config_file is not None and config_file.suffix == ".json"


def sizes_of_hf(path: Path) -> dict[str, Any]:
    """The table `model` of a config.json of Hugging Face's transformers."""
    from fzero.checkpoint.convert.huggingface import read_hf_config
    from fzero.models.configs import family_of

    sizes, _ = read_hf_config(path)
    return {"family": family_of(sizes), **dataclasses.asdict(sizes)}


MAX_RANKS = 1 << 24  # of a mesh: more than anybody has, and few enough to be counted


def parse_mesh(text: str, flag: str = "--mesh ") -> dict[str, int]:
    """Parse the sizes of a mesh's axes from a text such as dp=4,tp=2."""
    sizes = {}
    for item in text.split(","):
        axis, _, size = item.partition("=")
        if not (size.isascii() and size.isdecimal() and len(size) < 20):
            raise ValueError(f"{flag}{short(text)} is not of the form dp=4,tp=2")
        if axis.strip() in sizes:
            raise ValueError(f"{flag}{short(text)} has {axis.strip()} twice; give each axis one size")
        sizes[axis.strip()] = int(size)
    if math.prod(sizes.values()) > MAX_RANKS:
        raise ValueError(
            f"{flag}{short(text)} has {math.prod(sizes.values()):,} ranks; at most {MAX_RANKS:,} can be had"
        )
    return sizes


def config_of(
    table: dict[str, Any], config_file: Path | None, init: Path | None = None, *, has_mesh: bool = True
) -> Any:
    """The RunConfig of a table of `table_of`, with the model's sizes of the run `init` if given."""
    from fzero.run.config import config_table, unused_keys
    from fzero.run.setup.vocabulary import start_model

    if init is None:
        value = config_table.from_table(table)
    else:
        start = start_model(init, table)
        value = config_table.from_table({**start.table, "preset": start.preset}, start.config)
    if not is_written(config_file):  # the config.json of a run holds all values, even unused ones
        unused_keys.refuse_unused(value, table)
        if has_mesh:
            unused_keys.refuse_without_axis(value, table)
    return value

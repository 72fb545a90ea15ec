"""`fzero plan`: predict the resources and time of a run; compare plans; search for the best one (fzero/planner/)."""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from fzero.cli.flags import (
    AS_JSON,
    FOLDER,
    MAX_RANKS,
    SHORTHANDS,
    Flag,
    Number,
    config_flags,
    config_of,
    parse_mesh,
    refuse_idle,
    table_of,
)
from fzero.cli.name_checks import config_keys, expect_names, expect_preset
from fzero.cli.plan_questions import GENERATION, OF_SEARCH, answer_question, question_flags, workload_of
from fzero.cli.process import Progress
from fzero.comm.axes import mesh_text
from fzero.core import config_tables
from fzero.core.config_tables import COUNT, MEMORY_GB, POSITIVE, SIZE
from fzero.core.text_parsing import Unparsable, nearest, parse_toml
from fzero.core.torch_private import without_collection
from fzero.planner import launch

MAX_CLASSES = 1 << 20  # of --classes: beyond any head of scores
RATE_GBS = (0.0, False, 1e6)


def on_disk(config: Any, device: Any) -> bool:
    """Whether a run has a state on a disk."""
    from fzero.sharding.spec import Offload

    return Offload.parse(config.offload).on_disk


def on_nodes(config: Any, device: Any) -> bool:
    """Whether a run has ranks on several nodes of a device."""
    ranks = math.prod(config.mesh.values())
    return ranks > device.on_node(ranks)


def over_ep(config: Any, device: Any) -> bool:
    """Whether a run has experts over ep."""
    return config.mesh.get("ep", 1) > 1


@click.command()
@config_flags
@click.option(
    "--gpu",
    default="h100",
    show_default=True,
    help="The kind of the devices: h100, a100, 4090, ... (docs/bench.md lists them), here (fzero bench), or a file.",
)
@click.option(
    "--nproc-per-node",
    "ranks_on_node",
    type=Number(int, SIZE),
    help="The ranks on a machine. Default: as many as the device's links connect.",
)
@click.option("--memory-gb", type=Number(float, MEMORY_GB), help="The memory of a device in GB. Default: the device's.")
@click.option(
    "--nvme-gbs",
    cls=Flag,
    needs="a state on a disk, such as --offload opt=nvme",
    of=on_disk,
    type=Number(float, RATE_GBS),
    help="The rate of a node's disk in GB/s, of reads and of writes.",
)
@click.option(
    "--between",
    cls=Flag,
    needs="ranks on several nodes, by --mesh and --nproc-per-node",
    of=on_nodes,
    metavar="GBIT[:MS]",
    help="The links between nodes: Gbit/s of a node, ms of a message. For example 10:5.",
)
@click.option(
    "--tokens",
    type=Number(float, POSITIVE),
    help="A budget of tokens, such as 1e12: its days and cost, and the steps that --out writes.",
)
@click.option(
    "--price-per-gpu-hour",
    "price",
    cls=Flag,
    needs="--tokens",
    type=Number(float, POSITIVE),
    help="The price of one device for an hour.",
)
@click.option("--rank", type=Number(int, COUNT), default=0, show_default=True, help="The rank whose memory is shown.")
@click.option(
    "--search",
    "searches",
    is_flag=True,
    help="Find mesh, stage, recomputation, offload and micro-batch for --world-size devices.",
)
@click.option(
    "--world-size",
    cls=Flag,
    needs="--search",
    type=Number(int, (1, True, MAX_RANKS, True)),
    help="The number of devices for a search, with a rank on each.",
)
@click.option(
    "--top",
    cls=Flag,
    needs="--search",
    type=Number(int, SIZE),
    default=10,
    show_default=True,
    help="The number of plans that a search shows.",
)
@click.option(
    "--out",
    cls=Flag,
    needs="--search",
    type=FOLDER,
    metavar="RUN.TOML",
    help="Where to write. The best config of a search, .toml or .json, for fzero pretrain.",
)
@click.option(
    "--slurm",
    cls=Flag,
    needs="--search",
    type=FOLDER,
    metavar="FILE",
    help="Where to write a Slurm script that trains by the config of --out.",
)
@click.option(
    "--vary",
    metavar="NAME=A,B",
    multiple=True,
    help="Plan each of these values, in a row each: remat=none,full. Repeat for all combinations.",
)
@question_flags
@click.option("--lora-rank", type=Number(int, SIZE), help="Plan LoRA of this rank: only its factors are trained.")
@click.option(
    "--lora-targets", metavar="REGEX", help="The weights that get factors. Default: those of attention and MLP."
)
@click.option(
    "--quantize",
    metavar="KIND",
    help="Have weights of layers in nf4, int4 or int8. They are frozen: this is QLoRA.",
)
@click.option(
    "--classes",
    type=Number(int, (1, True, MAX_CLASSES, True)),
    help="Plan a head of so many classes, to learn labels. 1 is a reward.",
)
@click.option(
    "--roofline", "by_part", is_flag=True, help="Show what bounds each part of the step, and how near its limit it is."
)
@click.option(
    "--imbalance",
    cls=Flag,
    needs="experts over ep, such as --mesh ep=2",
    of=over_ep,
    metavar="FACTOR",
    help="How uneven experts over ep are: the rows of the fullest rank over the mean, or a run that recorded them.",
)
@click.option("--no-cache", is_flag=True, help="Trace anew, and keep no trace for the next plan.")
@AS_JSON
def plan(
    config_file: Path | None,
    settings: tuple[str, ...],
    mesh: str | None,
    gpu: str,
    memory_gb: float | None,
    nvme_gbs: float | None,
    between: str | None,
    searches: bool,
    world_size: int | None,
    top: int,
    out: Path | None,
    slurm: Path | None,
    vary: tuple[str, ...],
    question: str | None,
    lora_rank: int | None,
    lora_targets: str | None,
    quantize: str | None,
    classes: int | None,
    by_part: bool,
    imbalance: str | None,
    no_cache: bool,
    as_json: bool,
    ranks_on_node: int | None,
    price: float | None,
    tokens: float | None,
    rank: int,
    **flags: Any,
) -> None:
    """Predict memory, communication, time and cost of a run, without its hardware and its weights."""
    if flags["device"] is not None:
        raise ValueError(f"--device is {flags['device']}, and a plan is for --gpu; use --gpu, or leave it out")
    kind, workload = of_many(searches, bool(vary)), workload_of(question, flags)
    refuse_conflicts(kind, question, as_json, {"--roofline": by_part, "--tokens": tokens is not None})
    refuse_lora_flags(lora_rank, lora_targets, None if question in GENERATION else quantize, kind)
    if slurm is not None and out is None:
        raise ValueError("--slurm needs --out RUN.TOML, the config that the script starts")
    if searches:
        refuse_decided_flags(config_file, settings, {**flags, "mesh": mesh})
        if world_size is None:
            raise ValueError("--search needs --world-size, the number of devices")
    table = table_of(config_file, settings, mesh, flags)
    choices = parse_choices(vary)
    expect_names(table, gpu, *choices.get("gpu", ()))
    with without_collection():
        from fzero.planner import closed_forms, search_result  # noqa: F401  (with torch)
        from fzero.planner import plan as plans
    make_config = partial(config_of, config_file=config_file, has_mesh=not searches and not vary)
    config = make_config(table)
    if out is not None and tokens is not None:
        config = make_config(with_steps_of(tokens, table, config))
    config = with_model_flags(config, classes, lora_rank, lora_targets, quantize)
    device = plans.device_with(
        gpu, memory_gb, nvme_gbs, imbalance, between, price_per_hour=price, ranks_on_node=ranks_on_node
    )
    refuse_small_memory(device, memory_gb)
    if not (kind or question):  # which change the config
        refuse_idle(config, device)
    if searches and world_size is not None:
        answer = search_plans(config, world_size, device, top, out, slurm)
        if question:
            second = answer_question(question, answer.config, device, cache_of(no_cache), workload)
            answer = search_result.AnsweredSearch(answer, second)
    elif question:
        answer = answer_question(question, config, device, cache_of(no_cache), workload)
    elif vary:
        from fzero.planner import plan as variants

        with Progress("planning") as show:
            answer = variants.vary(table, choices, gpu=device, say=show, cache=cache_of(no_cache), rank=rank)
    else:
        answer = plan_config(config, device, cache_of(no_cache), rank)
    answer = answer if tokens is None else answer.for_tokens(tokens)
    click.echo(answer.to_json() if as_json else str(answer))
    if by_part:
        from fzero.planner import plan_report
        from fzero.planner.plan_report import PlanReport

        assert isinstance(answer, PlanReport)  # one plan
        click.echo("\n" + plan_report.roofline_page(answer))


def with_steps_of(tokens: float, table: dict[str, Any], config: Any) -> dict[str, Any]:
    """The table with the steps of a budget of tokens, for the config that a search writes."""
    if "steps" in table.get("train", {}) or config.train.batch_ramp:
        explicit_key = "train.batch_ramp" if config.train.batch_ramp else "train.steps"
        raise ValueError(
            f"--out writes the steps of --tokens {tokens:g}, and {explicit_key} is given; leave out --tokens"
        )
    steps = max(1, round(tokens / (config.train.batch * config.data.seq_len)))
    return {**table, "train": {**table.get("train", {}), "steps": steps}}


def of_many(searches: bool, vary: bool) -> str:
    """The flag that makes many plans, "--search" or "--vary"; "" for neither."""
    if searches and vary:
        raise ValueError("--search and --vary exclude each other; give one of them")
    return "--search" if searches else "--vary" if vary else ""


def refuse_conflicts(kind: str, question: str | None, as_json: bool, of_one: dict[str, bool]) -> None:
    """Raise ValueError for flags that exclude each other; kind: "--search", "--vary" or ""."""
    conflicts = [kind] if kind else [flag for flag, present in of_one.items() if present]
    if question and conflicts and not (question in OF_SEARCH and kind == "--search"):
        raise ValueError(f"--ask {question} answers one question; leave out {conflicts[0]}")
    if of_one["--roofline"] and (kind or as_json):
        raise ValueError(f"--roofline is for one plan in words; leave out {kind or '--json, which has time.parts'}")


def refuse_lora_flags(rank: int | None, targets: str | None, quantize: str | None, kind: str) -> None:
    """Raise ValueError for flags of LoRA without its rank, or beside `kind`, a flag that makes many plans."""
    if rank is None and targets is not None:
        raise ValueError("--lora-targets needs --lora-rank, the rank of the factors")
    if rank is None and quantize is not None:
        raise ValueError("--quantize needs --lora-rank: frozen weights are in codes, and LoRA's factors are trained")
    if rank is not None and kind:
        raise ValueError(f"--lora-rank is for one plan; leave out {kind}")


def with_model_flags(
    config: Any, classes: int | None, rank: int | None, targets: str | None, quantize: str | None
) -> Any:
    """The config with the head of --classes, the codes of --quantize and the factors of --lora-rank."""
    from fzero.planner import plan as plans

    config = config if classes is None else plans.with_classes(config, classes)
    if rank is None:
        return config if quantize is None else plans.with_codes(config, quantize)
    if config.optim.name == "muon":
        raise ValueError(
            "optim.name is muon, which trains other leaves than matrices too, and LoRA has matrices only; add --set "
            "optim.name=adamw"
        )
    return plans.with_lora(config, rank, targets, quantize)


def refuse_small_memory(device: Any, memory_gb: float | None) -> None:
    """Raise ValueError for a memory of a device in which no tensor has a place."""
    if device.memory_bytes <= device.reserved_bytes:
        memory = f"the memory of {device.name} is {device.memory_bytes / 1e9:g} GB"
        raise ValueError(
            f"{memory if memory_gb is None else f'--memory-gb is {memory_gb:g}'}; it must be above the "
            f"{device.reserved_bytes / 1e9:.2f} GB that the driver and libraries take"
        )


def cache_of(no_cache: bool) -> Path | None:
    """The folder of the traces of earlier plans; None for --no-cache."""
    from fzero.planner.trace_cache import cache_folder

    return None if no_cache else cache_folder()


def plan_config(config: Any, device: Any, cache: Path | None, rank: int) -> Any:
    """The PlanReport of a config; its closed-form estimate is printed on stderr first."""
    from fzero.planner import plan as plans
    from fzero.planner.closed_forms import first_estimate
    from fzero.planner.trace_cache import is_cached

    sizes, resolved = plans.sizes_of(config, None), plans.resolve_for(config, device)
    if rank >= (world := math.prod(sizes.values())):
        raise ValueError(f"--rank is {rank} and a run on {mesh_text(sizes)} has ranks 0 to {world - 1}")
    line = ""
    if sizes.get("pp", 1) > 1:
        cache = None  # the closed forms and the kept traces are of steps without pp
    elif cache is not None and is_cached(resolved, sizes, rank, device.target, cache):
        line = f"fzero: the trace of an earlier plan in {cache} answers this; --no-cache traces anew"
    else:
        line = str(first_estimate(resolved, sizes, device, rank))
    if line:
        print(line, file=sys.stderr, flush=True)
    with Progress("tracing") as show:
        return plans.plan(config, gpu=device, say=show, cache=cache, rank=rank)


def parse_choices(texts: tuple[str, ...]) -> dict[str, list[Any]]:
    """{name: values} of texts NAME=A,B; a semicolon, if there is one, separates values that have commas."""
    choices: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        name = SHORTHANDS.get(key.strip().replace("-", "_"), key.strip())
        if not equals or not name:
            raise ValueError(f"--vary {text!r} is not of the form NAME=A,B, such as remat=none,full")
        if name in choices:
            raise ValueError(f"--vary gives {name} twice; give all its values at once")
        check_choice(name)
        parts = [choice.strip() for choice in values.split(";" if ";" in values else ",")]
        choices[name] = [
            parse_mesh(choice, "--vary mesh=") if name == "mesh" else parse_value(choice) for choice in parts
        ]
    for name in choices.get("preset", ()):
        expect_preset(name)
    return choices


def check_choice(name: str) -> None:
    """Raise ValueError if --vary names nothing that a plan has."""
    if name not in ("gpu", *SHORTHANDS.values()) and name.partition(".")[0] not in config_keys():
        near = nearest(name, [*SHORTHANDS, "mesh", "gpu", *SHORTHANDS.values()])
        raise ValueError(
            f"--vary {name}: nothing of that name{near}; it is a flag of a config, mesh, gpu, or a.b of --set"
        )


def parse_value(text: str) -> Any:
    """Parse a number or a truth value in TOML's syntax; any other text is itself."""
    try:
        return parse_toml(f"value = {text}", f"--vary {text}")["value"]
    except Unparsable:
        return text


def refuse_decided_flags(config_file: Path | None, settings: tuple[str, ...], flags: dict[str, Any]) -> None:
    """Raise ValueError naming what the user gives and a search decides: a flag, a --set, or a .toml entry."""
    keys = {**SHORTHANDS, "mesh": "mesh"}
    if flags.pop("deepspeed") is not None:
        raise ValueError("--search decides stage, micro-batch and offload, which --deepspeed sets; give --config")
    decided_flags = [name for name, value in flags.items() if value is not None and launch.decides(keys[name])]
    if decided_flags:
        flagged = ", ".join(f"--{name.replace('_', '-')}" for name in decided_flags)
        raise ValueError(f"--search chooses {flagged} itself; leave that out")
    for setting in settings:
        key, value = config_tables.parse_setting(setting)
        table: dict[str, Any] = {}
        config_tables.set_nested(table, key, value)
        launch.refuse_decided(table, "--set")
    if config_file is not None and config_file.suffix == ".json":
        decided = ", ".join(launch.DECIDED)
        print(f"fzero: --search decides {decided}; those of {config_file} do not count", file=sys.stderr)
    elif config_file is not None:
        launch.refuse_decided(config_tables.read_table(config_file), str(config_file))


def search_plans(config: Any, gpus: int, gpu: Any, top: int, out: Path | None, slurm: Path | None) -> Any:
    """Search, write the best config to `out` and its script to `slurm`; the SearchResult."""
    from fzero.core.host_memory import cores
    from fzero.core.storage import write_text
    from fzero.planner import search

    if out is not None:
        search.expect_config_path(out)
    with Progress("searching") as show:
        result = search.search(config, gpus, gpu=gpu, top=top, say=show, workers=cores())
    if out is not None:
        search.write_config(result.config, out)
        best = result.best[0].report
        command = launch.launch_command(out, gpus, best.ranks_on_node)
        nodes, _ = launch.machines(gpus, best.ranks_on_node)
        machines_text = f" on each of {nodes} machines, of which HOST is one" if nodes > 1 else ""
        print(f"wrote {out}; start it{machines_text} with: {command}", file=sys.stderr)
        if slurm is not None:
            script = launch.slurm_script(out, gpus, best.ranks_on_node, gpu=best.device.kind != "cpu")
            write_text(slurm.parent, slurm.name, script)
            print(f"wrote {slurm}; start it with: sbatch {slurm}", file=sys.stderr)
    return result

"""The commands that prepare, convert and show: data, import, export, doctor, config."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from fzero.cli.flags import DEVICE, EMA, FOLDER, Flag, Number, config_flags, config_of, refuse_idle, table_of
from fzero.cli.process import say
from fzero.core import packages
from fzero.core.config_tables import LENGTH, SEED, SIZE


@click.command("config")
@config_flags
@click.option("--diff", "run", type=FOLDER, metavar="RUN", help="Show the values that differ from those of this run.")
def config_command(
    config_file: Path | None, settings: tuple[str, ...], mesh: str | None, run: Path | None, **flags: Any
) -> None:
    """Show every value of a run's config with its meaning, as a file for --config."""
    from fzero.run.config import config_table
    from fzero.run.setup import run_folder

    table = table_of(config_file, settings, mesh, flags)
    config = config_of(table, config_file)
    if run is None:
        click.echo(config_table.commented(config), nl=False)
        return
    lines = config_table.differences(config, run_folder.read_config(run))
    click.echo("\n".join(lines) if lines else f"the config is that of {run}")


@click.group(name="data")
def data_group() -> None:
    """Prepare, link, verify, analyze and show the text that runs train on."""


OUT = click.option(
    "--out", type=FOLDER, required=True, metavar="FOLDER", help="Where to write. The new folder of the corpus."
)
VAL_FRACTION = click.option(
    "--val-fraction",
    type=Number(float, (0.0, False, 1.0)),
    default=0.02,
    show_default=True,
    help="The fraction of documents for validation.",
)


def with_keys(sources: tuple[str, ...]) -> bool:
    """Whether a source may have texts by keys: its name is not that of a single text."""
    single = (".txt", ".py", ".txt.gz", ".py.gz", ".txt.zst", ".py.zst")
    return any(source not in ("stdlib", "-") and not source.endswith(single) for source in sources)


EOS = click.option("--eos", help="The end-of-document token of a tokenizer.json.")


LINES, QUOTED = "-.jsonl", "./-.jsonl/-"  # standard input; and what no file is called


class Prepare(click.Command):
    """A command whose arguments may be "-.jsonl", which click takes for an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [QUOTED if arg == LINES else arg for arg in args])


@data_group.command(cls=Prepare)
@click.argument("sources", nargs=-1, callback=lambda _, __, names: tuple(n.replace(QUOTED, LINES) for n in names))
@OUT
@click.option(
    "--tokenizer", default="bytes", show_default=True, help="The tokenizer. bytes, bpe:N, or a tokenizer.json."
)
@VAL_FRACTION
@EOS
@click.option(
    "--text-key",
    cls=Flag,
    needs="sources with keys, .jsonl, .parquet or .arrow",
    of=with_keys,
    default="text",
    show_default=True,
    help="The key of the text in a .jsonl line.",
)
@click.option(
    "--seed",
    type=Number(int, SEED),
    default=0,
    show_default=True,
    help="The seed of all random numbers. They choose the validation documents.",
)
@click.option(
    "--workers",
    type=Number(int, (0, True, 4096)),
    default=0,
    help="The number of processes. Default: one for each core.",
)
@click.option(
    "--duplicates",
    default="keep",
    show_default=True,
    help="Keep them, or leave out what repeats an earlier document. keep, or exact (the same text).",
)
def prepare(sources: tuple[str, ...], out: Path, workers: int, duplicates: str, **options: Any) -> None:
    """Turn text (files, folders, '-', stdlib) into a corpus of token files.

    The same command goes on after an interrupt or a kill, from the folder OUT.partial."""
    from fzero import data
    from fzero.data.prepare import path_of

    refuse_idle(sources)

    try:
        with bytes_bar() as show:
            preparing = data.Preparing(workers, show, (), duplicates)
            meta = data.prepare(list(sources), out, preparing=preparing, **options)
    except KeyboardInterrupt:
        if path_of(out).exists():
            print(f"fzero: {path_of(out)} has what is done; the same command goes on from there", file=sys.stderr)
        raise
    say(data.describe(meta))


@contextlib.contextmanager
def bytes_bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """A context of a function that shows (work, bytes done, bytes of all) in a bar; None without a terminal."""
    if not (sys.stderr.isatty() and packages.installed("tqdm")):
        yield None
        return
    from fzero.run.measure.metrics_rows import sized_bar

    with sized_bar(unit="B", unit_scale=True, leave=False) as bar:

        def show(stage: str, done: int, total: int) -> None:
            if bar.desc != f"{stage}: ":
                bar.set_description(stage, refresh=False)
                bar.reset(total)
                bar.initial = bar.n = bar.last_print_n = done  # of an earlier attempt: no rate follows from them
            bar.update(done - bar.n)

        yield show


@data_group.command()
@click.argument("source")
@OUT
@click.option("--tokenizer", help="The tokenizer. bytes, or the tokenizer.json that made the tokens of a file.")
@VAL_FRACTION
@EOS
def link(source: str, out: Path, tokenizer: str | None, **options: Any) -> None:
    """Make a corpus of tokens that are read in place: a .npy, Megatron's .bin beside its .idx, or a corpus at a URL.

    A corpus at a URL (s3://, gs://, file://, http://) has its tokenizer and its split."""
    from fzero import data
    from fzero.core.storage import is_url

    if is_url(source):
        if tokenizer is not None:
            raise ValueError(f"--tokenizer is {tokenizer} and {source} has its own; leave it out")
        meta = data.link_url(source, out)
    elif tokenizer is None:
        raise ValueError(f"--tokenizer: name the one that made the tokens of {source}: bytes, or its tokenizer.json")
    else:
        meta = data.link(source, out, tokenizer=tokenizer, **options)
    location = meta["remote"]["url"] if "remote" in meta else meta["linked"]["path"]
    splits = ", ".join(f"{name}: {n['tokens']:,} tokens in {n['documents']:,}" for name, n in meta["splits"].items())
    say(f"{out}: reads {location} in place; {splits} documents")


@data_group.command()
@click.argument("corpus", type=FOLDER)
def verify(corpus: Path) -> int:
    """Compare every byte of a prepared corpus with its checksum; exits with 1 if one does not match.

    A run does so for what it reads, when it reads it for the first time."""
    from fzero import data

    damages = data.verify(corpus)
    for damage in damages:
        say(damage)
    if not damages:
        say(f"{corpus}: sound")
    return 1 if damages else 0


@data_group.command()
@click.argument("corpus", type=FOLDER)
@click.option(
    "--metric",
    type=click.Choice(["length", "rarity", "loss"]),
    required=True,
    help="The number of each sequence. length (of its documents), rarity (of its tokens), or loss (of a model).",
)
@click.option("--seq-len", type=Number(int, LENGTH), required=True, help="The tokens in a sequence.")
@click.option(
    "--packing",
    default="stream",
    show_default=True,
    help="How documents fill sequences: stream (end to end), best-fit (whole, what is left filled up); of a run also "
    "buckets (each in a row of its own, batches by length).",
)
@click.option("--reference", type=FOLDER, metavar="RUN", help="The run whose model's loss is the number.")
@click.option("--name", default="", help="The name of the analysis. Default: the metric.")
@DEVICE
def analyze(
    corpus: Path, metric: str, seq_len: int, packing: str, reference: Path | None, name: str, device: str | None
) -> None:
    """Find a number for each sequence of a corpus, by which data.curriculum orders them.

    It is written beside the corpus, in analysis-NAME-LENGTH-PACKING/."""
    from fzero import data
    from fzero.core import gpu
    from fzero.data.curriculum import analysis_folder, describe_values

    if (metric == "loss") != (reference is not None):
        fix = "give --reference RUN" if reference is None else f"leave it out, or use --metric loss, not {metric}"
        raise ValueError(f"--reference: the run whose model's loss is found; {fix}")
    if reference is None:
        values = data.analyze(corpus, metric, seq_len=seq_len, packing=packing, name=name)
    else:
        from fzero.run.runner.evaluate import analyze_by_model

        options = {"seq_len": seq_len, "packing": packing, "name": name}
        torch_device = gpu.use_device(gpu.resolve_device(device or "auto"))
        values, passed = analyze_by_model(corpus, reference, **options, device=torch_device)
        for warning in passed:
            print(warning, file=sys.stderr)
    for line in describe_values(values, metric):
        say(line)
    say(f"written: {analysis_folder(corpus, name or metric, seq_len, packing)}")


@data_group.command()
@click.argument("run", type=FOLDER)
@click.option("--step", type=Number(int, SIZE), required=True, help="A step of the run. It may be one to come.")
def show(run: Path, step: int) -> None:
    """Show the documents of a step of a run: row by row their source, their number, and how they begin."""
    from fzero.run.runner.step_rows import documents_of, lines_of

    for line in lines_of(documents_of(run, step)):
        say(line)


@click.command(name="import")
@click.argument("source", type=FOLDER)
@click.option("--out", type=FOLDER, required=True, metavar="RUN", help="Where to write. The new run folder.")
@click.option(
    "--hf-config",
    type=FOLDER,
    metavar="HF_CONFIG.json",
    help="The file with the model's sizes. Default: config.json in SOURCE.",
)
@click.option(
    "--upcycle",
    metavar="experts=N,top=K",
    help="Make a mixture of experts of a dense model. Each expert is a copy of its feed-forward part.",
)
def import_command(source: Path, out: Path, hf_config: Path | None, upcycle: str | None) -> None:
    """Make a run folder of a model that another system saved: GPT-2, Llama, Qwen, Mistral, Gemma and others.

    SOURCE is a folder of Hugging Face transformers, a torch.distributed.checkpoint, or a DeepSpeed universal
    checkpoint. It uses no GPU."""
    from fzero.run.setup import weights

    say(weights.import_weights(source, out, hf_config, upcycle))


@click.command()
@click.argument("run", type=FOLDER)
@click.option("--out", type=FOLDER, required=True, metavar="HF_FOLDER", help="Where to write. The new folder.")
@click.option("--adapter", is_flag=True, help="Write LoRA's factors alone, as an adapter of PEFT.")
@EMA
def export(run: Path, out: Path, adapter: bool, ema: bool) -> None:
    """Write the model of a run in the format of Hugging Face transformers. It uses no GPU."""
    from fzero.run.setup import weights

    line, passed = (weights.export_adapter if adapter else weights.export_hf)(run, out, ema=ema)
    for warning in passed:
        print(warning, file=sys.stderr)
    say(line)


@click.command()
def doctor() -> None:
    """Show the relevant features of this machine, and which of them fzero will use."""
    from fzero.run.measure.doctor import diagnose

    say(diagnose())


@click.command()
def models() -> None:
    """List the named models that `--model` takes."""
    from fzero.models import num_params
    from fzero.models.presets import PRESETS, build

    rows: list[tuple[str, ...]] = [("model", "parameters", "layers", "width", "vocabulary", "longest")]
    for name, make in PRESETS.items():
        config = make()
        sizes = (getattr(config, field, "") for field in ("n_layers", "d_model", "vocab_size", "max_len"))
        rows.append((name, f"{num_params(build(config)):,}", *map(str, sizes)))
    for name, *sizes in rows:
        say(f"{name:14}" + "".join(f"{size:>{width}}" for size, width in zip(sizes, (20, 8, 8, 12, 9))))

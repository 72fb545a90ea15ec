"""`fzero evaluate`: a model's results in tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from fzero.cli.flags import AS_JSON, DEVICE, EMA, FOLDER, Number
from fzero.cli.process import say
from fzero.core.config_tables import COUNT, SIZE


@click.command()
@click.argument("run", type=FOLDER)
@click.option("--tasks", required=True, metavar="NAMES", help="Tasks of lm-evaluation-harness, separated by commas.")
@click.option("--task-folder", type=FOLDER, help="A folder with tasks of your own (.yaml).")
@click.option("--shots", type=Number(int, COUNT), help="Examples before each question. Default: as the task says.")
@click.option("--limit", type=Number(int, SIZE), help="The questions of each task. Default: all.")
@click.option("--chat-questions", is_flag=True, help="Ask by the model's chat template.")
@click.option("--kernels", default="auto", show_default=True, help="The form of operations. canonical: equal bits.")
@AS_JSON
@EMA
@DEVICE
def evaluate(
    run: Path,
    tasks: str,
    task_folder: Path | None,
    shots: int | None,
    limit: int | None,
    chat_questions: bool,
    kernels: str,
    as_json: bool,
    ema: bool,
    device: str | None,
) -> None:
    """Measure a run's model, or one of transformers, by tasks of the package lm-eval."""
    from fzero.core import gpu, packages
    from fzero.kernels import Kernels
    from fzero.run.runner.harness import evaluate_tasks
    from fzero.run.setup.text_model import load_text_model

    packages.load("lm_eval", "fzero evaluate")
    Kernels.parse(kernels)
    torch_device = gpu.use_device(gpu.resolve_device(device or "auto"))
    text_model = load_text_model(run, ema=ema, device=torch_device)
    for line in text_model.warnings:
        print(line, file=sys.stderr)
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    options = {"include": task_folder, "shots": shots, "limit": limit, "chat": chat_questions, "kernels": kernels}
    found = evaluate_tasks(text_model, names, **options)
    if as_json:
        say(json.dumps(found["results"], indent=2))
        return
    for task, metrics in found["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float) and "stderr" not in name:
                say(f"{task}  {name.partition(',')[0]}  {value:.6g}")

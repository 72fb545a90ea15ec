"""Learning curves of every way to send fewer bytes between ranks, beside plain data parallelism.

    python benchmarks/learning.py --out benchmarks/results/learning-codecs.json
    python benchmarks/learning.py --out benchmarks/results/learning-codecs.json --picture docs/learning.svg

Each form trains a small Llama on the standard library's source for 400 steps from several seeds, which give the first
parameters and the order of the texts: forms of one seed have the same ones, and the same texts of validation. The file
is written after every run, and the same command goes on where it was: what is in it is not run again. `beside` is the
form that a form is compared with; `apart` the mean over seeds of its last loss by that one's, less 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from spawned import answer_of_ranks
from turns import write_run

SIZES = {"d_model": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "d_ff": 176, "max_len": 64}
STEPS, EVERY, BATCH = 400, 100, 16


class Form(NamedTuple):
    """How a run differs from the plain one, and the form beside which it is."""

    mesh: dict[str, int]
    settings: dict[str, Any]
    beside: str = "plain"
    goal: float = 0.005  # of `apart`


def coded(codec: str, mesh: dict[str, int] | None = None) -> Form:
    """A form of stage 3 with a codec."""
    return Form(mesh or {"dp": 2}, {"zero": 3, "codec": codec})


def signs(name: str, beside: str = "plain", **more: Any) -> Form:
    """A form whose optimizer sends signs."""
    return Form(
        {"dp": 2}, {"zero": 1, "optim.name": name} | {f"optim.{key}": value for key, value in more.items()}, beside
    )


def members(method: str, **more: Any) -> Form:
    """A form of two members that agree once in 20 steps."""
    given = {f"local.{key}": value for key, value in more.items()}
    goal = 0.01 if method == "diloco" else 0.005
    return Form({"dp": 1, "rp": 2}, {"local.method": method, "local.every": 20} | given, goal=goal)


def local_signs(**more: Any) -> Form:
    """A form of two ranks with 0/1 Adam's local steps."""
    given = {"optim.name": "zero_one_adam", "optim.sum_every": 16} | {f"optim.{key}": x for key, x in more.items()}
    return Form({"dp": 1, "rp": 2}, {"zero": 1, **given})


QUARTER, HALF = STEPS // 4, STEPS // 2  # of the steps, before members train apart
SHORT = {"lr": 0.5, "momentum": 0.3}  # of DiLoCo's outer optimizer: 0.7 and 0.9 are for more than 20 rounds
LAMB = {"lr": 1e-2, "weight_decay": 0.0}
FORMS = {
    "plain": Form({"dp": 2}, {}),
    "params=int8": coded("params=int8"),
    "grads=int4": coded("grads=int4"),
    "grads=int4,loco": coded("grads=int4,loco"),
    "grads=int4,loco,errors=int8": coded("grads=int4,loco,errors=int8"),
    "params=int8,grads=int4,hpz": coded("params=int8,grads=int4,hpz", {"rp": 2, "dp": 2}),
    "onebit_adam": signs("onebit_adam"),
    "zero_one_adam": signs("zero_one_adam"),
    "onebit_adam, rp": Form({"dp": 1, "rp": 2}, {"zero": 1, "optim.name": "onebit_adam"}),
    "zero_one_adam, sum_every=16": local_signs(),
    "zero_one_adam, sum_every=16, sum_double=64": local_signs(sum_double=64),
    "zero_one_adam, sum_every=16, freeze_steps=200": local_signs(freeze_steps=HALF),
    # the parts of a run of its authors: v moves in the first tenth, and intervals double after each 28%
    "zero_one_adam, sum_every=16, freeze_steps=40, sum_double=112": local_signs(freeze_steps=40, sum_double=112),
    # v moves until the rate falls, and intervals double where it has halved
    "zero_one_adam, sum_every=16, freeze_steps=160, sum_double=64": local_signs(freeze_steps=160, sum_double=64),
    "lamb": Form({"dp": 2}, {"optim.name": "lamb"} | {f"optim.{key}": value for key, value in LAMB.items()}),
    "onebit_lamb": signs("onebit_lamb", "lamb", **LAMB),
    "diloco": members("diloco"),
    "diloco, codec=int4": members("diloco", codec="int4"),
    "diloco, lr=0.5, momentum=0.3": members("diloco", **SHORT),
    "diloco, lr=0.5, momentum=0.3, codec=int4": members("diloco", codec="int4", **SHORT),
    "diloco, after=100": members("diloco", after=QUARTER),
    "diloco, after=200": members("diloco", after=HALF),
    "diloco, after=100, lr=0.5, momentum=0.3": members("diloco", after=QUARTER, **SHORT),
    "slowmo": members("slowmo"),
    "slowmo, after=200": members("slowmo", after=HALF),
    "localsgd": members("localsgd"),
    "localsgd, every=5": members("localsgd", every=5),
    "localsgd, after=200": members("localsgd", after=HALF),
}


def ranks_of(mesh: dict[str, int]) -> int:
    """The ranks of a mesh."""
    return math.prod(mesh.values())


def settings_of(form: Form, seed: int) -> dict[str, Any]:
    """The settings of a form's run."""
    given = {f"model.{name}": size for name, size in SIZES.items()} | {"data.seq_len": 64, "train.seed": seed}
    ranks = ranks_of(form.mesh)
    given |= {"train.batch": BATCH, "train.micro_batch": BATCH // ranks, "train.eval_batches": 16 * ranks}
    given |= {"train.steps": STEPS, "train.checkpoint_every": STEPS, "train.measure_every": 0, "train.compiled": False}
    given |= {"precision.policy": "fp32", "train.memory_check": False, "optim.name": "adamw", "optim.beta2": 0.99}
    return given | {"optim.schedule.warmup_steps": 20} | form.settings


# ---- a rank ----------------------------------------------------------------------------------------------------------


def work(rank: int, order: dict[str, Any], port: int, back: Connection) -> None:
    """Make the runs of an order on one of its ranks; the first writes each that has ended into the file."""
    import torch

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(order["ranks"]), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(order["ranks"])}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    for form, seed in order["runs"]:
        row = train(form, seed)
        if rank == 0:
            add_row(Path(order["out"]), row)
    back.send("ended")


def train(name: str, seed: int) -> dict[str, Any]:
    """The row of a run: its validation losses by step, and its seconds."""
    from dataclasses import replace

    import fzero
    from fzero.planner.plan import config_for, device_for, resolve_for
    from fzero.run.runner.evaluate import evaluate_all
    from fzero.run.setup import build, corpus
    from fzero.run.setup.build import agreed

    form, begin = FORMS[name], time.perf_counter()
    mesh = fzero.make_mesh(form.mesh, device="cpu")
    config = config_for("llama-tiny", settings_of(form, seed) | {"mesh": form.mesh})
    job = build.build(resolve_for(replace(config, mesh=form.mesh), device_for("here")), mesh)
    path = corpus.find_corpus(job.config, Path("."), lambda text: None)
    batch_at, validation = corpus.open_data(job.config, path, mesh)
    state, losses = build.first_state(job), {}
    for step in range(1, STEPS + 1):
        state, _ = job.train_step(state, batch_at((step - 1) * job.config.train.batch))
        if step % EVERY == 0:
            state = agreed(job, state, STEPS) if step == STEPS else state
            losses[str(step)] = evaluate_all(job, state, validation, 1.0)["val_loss"]
    return {"form": name, "seed": seed, "val_loss": losses, "seconds": time.perf_counter() - begin}


# ---- the file --------------------------------------------------------------------------------------------------------


def rows_of(out: Path) -> list[dict[str, Any]]:
    """The runs that a file has."""
    return json.loads(out.read_text())["rows"] if out.exists() else []


def add_row(out: Path, row: dict[str, Any]) -> None:
    """Write a run into a file beside those that it has."""
    write_run(out, os.getloadavg(), rows=[*rows_of(out), row])
    print(f"{row['form']:28} seed {row['seed']}  {row['val_loss'][str(STEPS)]:.4f}  {row['seconds']:.0f} s", flush=True)


def last_losses(rows: list[dict[str, Any]], form: str) -> dict[int, float]:
    """By seed the last validation loss of a form."""
    return {row["seed"]: row["val_loss"][str(STEPS)] for row in rows if row["form"] == form}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each form whose runs there are, in Markdown."""
    lines = ["| | validation loss | beside | apart | of seeds | goal |", "|---|---:|---|---:|---|---:|"]
    for name, form in FORMS.items():
        own, base = last_losses(rows, name), last_losses(rows, form.beside)
        seeds = sorted(own.keys() & base.keys())
        if not seeds:
            continue
        apart = [own[seed] / base[seed] - 1 for seed in seeds]
        each = " ".join(f"{x:+.2%}" for x in apart)
        mean = statistics.mean(apart)
        goal = "" if name == form.beside else f"{form.goal:.1%}{'' if mean <= form.goal else ': missed'}"
        loss = statistics.mean(own.values())
        lines.append(f"| `{name}` | {loss:.4f} | {form.beside} | {mean:+.2%} | {each} | {goal} |")
    return lines


def panel_of(name: str) -> str:
    """The title of the picture's part in which a form is."""
    if name.split(",")[0] in ("diloco", "slowmo", "localsgd"):
        return "members that agree once in H steps"
    return "0/1 Adam's local steps" if "sum_every" in name else "sums in each step"


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """The means over seeds of each form's validation loss by that of the form beside it, by step."""
    from matplotlib.figure import Figure

    curves: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        curves.setdefault(row["form"], []).append(row["val_loss"])
    steps = [str(step) for step in range(EVERY, STEPS + 1, EVERY)]
    mean = {name: [statistics.mean(run[step] for run in runs) for step in steps] for name, runs in curves.items()}
    panels: dict[str, list[str]] = {}
    for name, form in FORMS.items():
        if name in mean and name != form.beside and name != "lamb":
            panels.setdefault(panel_of(name), []).append(name)
    figure = Figure(figsize=(8.5, 10.0), layout="constrained")
    each = figure.subplots(len(panels), squeeze=False, sharex=True)[:, 0]
    for axes, (title, names) in zip(each, panels.items()):
        for i, name in enumerate(names):
            form = FORMS[name]
            apart = [100 * (a / b - 1) for a, b in zip(mean[name], mean[form.beside])]
            label = name if form.beside == "plain" else f"{name} beside {form.beside}"
            axes.plot([int(step) for step in steps], apart, ("-", "--", ":")[i // 7], label=label, color=f"C{i % 7}")
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_ylabel("validation loss beside plain, %")
        axes.set_yscale("symlog", linthresh=1.0)
        axes.axhline(0.0, color="gray", linewidth=0.5)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    each[-1].set_xlabel("step")
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default=";".join(FORMS), help="separated by semicolons")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write, or to go on with")
    parser.add_argument("--picture", type=Path, help="draw what the file has, and run nothing")
    given = parser.parse_args()
    if given.picture:
        draw(rows_of(given.out), given.picture)
    else:
        done = {(row["form"], row["seed"]) for row in rows_of(given.out)}
        for seed, ranks in itertools.product(map(int, given.seeds.split(",")), (2, 4)):
            forms = [form for form in given.forms.split(";") if ranks_of(FORMS[form].mesh) == ranks]
            if runs := [(form, seed) for form in forms if (form, seed) not in done]:
                answer_of_ranks(work, {"ranks": ranks, "runs": runs, "out": str(given.out)})
    print("\n".join(table(rows_of(given.out))))


if __name__ == "__main__":
    main()

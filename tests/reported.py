"""Run folders for reports, made by hand in the form that a run writes them: small, and every number another one."""

import json
import math

from fzero.run import config_table, from_table, run_folder
from fzero.run.measure.memory_timeline import COMPONENTS

STATE = {"params": 1_000_448, "master": 2_000_896, "opt": 2_400_512, "other": 44}


def timeline(scale, layers=4):
    """Moments of a step: forward fills with activations, backward empties them and fills gradients, the update needs a
    workspace."""
    moments, at = [], 0
    rest = {"params": 1_000_448, "master": 2_000_896, "optimizer": 2_400_512, "batch": 8_192}

    def add(phase, layer, op, **parts):
        nonlocal at
        at += 37
        parts = {**rest, **{name: int(n * scale) for name, n in parts.items() if n}}
        moments.append(
            {"phase": phase, "layer": layer, "op": op, "bytes": sum(parts.values()), "parts": parts, "at": at}
        )

    for i in range(layers):
        add("forward", i, "aten.mm", activations=900_000 * (i + 1), gathered=250_000, workspace=60_000)
    add("forward", None, "fzero.cross_entropy", activations=900_000 * layers, workspace=1_500_000)
    for i in reversed(range(layers)):
        left = 900_000 * (i + 1)
        add(
            "backward",
            i,
            "aten.mm",
            activations=left,
            grads=250_000 * (layers - i),
            gathered=250_000,
            workspace=400_000,
        )
    add("update", None, "optimizer", grads=250_000 * layers, workspace=800_000)
    add("update", None, "optimizer", grads=250_000 * layers)
    return moments


def ledger(dp=2, tp=1):
    """Rows of a step's ledger."""
    rows = []
    for phase, collective, axis, leaf, calls, elements in (
        ("forward", "all_gather", "dp", "blocks", 8, 250_112),
        ("backward", "all_gather", "dp", "blocks", 8, 250_112),
        ("backward", "psum_scatter", "dp", "blocks", 8, 250_112),
        ("metrics", "psum", "dp", "loss", 1, 3),
        ("forward", "psum", "tp", "x", 8, 65_536),
        ("backward", "psum", "tp", "x", 8, 65_536),
    ):
        if {"dp": dp, "tp": tp}[axis] > 1:
            sizes = {"calls": calls, "elements": elements, "bytes": 4 * elements}
            rows.append(
                {"phase": phase, "collective": collective, "axis": axis, "leaf": leaf, "dtype": "float32", **sizes}
            )
    return rows


def metrics(steps, batch, seq_len, ranks, speed, axes, layers=4):
    """Rows of metrics.jsonl."""
    rows = []
    for step in range(1, steps + 1):
        wobble = 1.0 + 0.05 * math.sin(1.7 * step)
        spent = (5.0 if step == 1 else 1.0) * wobble * batch * seq_len / speed
        saves, looks = step % 20 == 1 and step > 1, step % 10 == 0
        shares = {
            "data": 0.01,
            "forward": 0.29,
            "backward": 0.45,
            "metrics": 0.02,
            "update": 0.15,
            "io": 0.0,
            "rest": 0.03,
        }
        waiting = 0.05 if ranks > 1 else 0.0
        phases = {name: share * spent for name, share in shares.items()} | {"comm_exposed": waiting * spent}
        phases |= {"evaluate": 0.4 * spent if looks else 0.0, "checkpoint": 0.6 * spent if saves else 0.0}
        row = {
            "step": step,
            "loss": 2.0 + 3.6 * math.exp(-step / 12) + 0.04 * math.cos(3 * step),
            "grad_norm": 0.5 + 12 / step,
            "lr": 0.01,
        }
        row |= {"loss_scale": 1.0, "skipped": False, "num_tokens": batch * seq_len, "tokens": step * batch * seq_len}
        row |= {
            "step_s": spent,
            "data_s": phases["data"],
            "tokens_per_s": batch * seq_len / spent,
            "wall_s": sum(phases.values()),
        }
        utilisation = batch * seq_len / spent * 2e7 / 2e11
        row |= {
            "mfu": utilisation,
            "mfu_causal": 0.97 * utilisation,
            "hfu": 1.2 * utilisation,
            "hfu_causal": 1.15 * utilisation,
        }
        row |= {
            "phases": phases,
            "comm": {axis: {"exposed": waiting * spent / len(axes), "hidden": 0.04 * spent} for axis in axes},
        }
        if looks:
            row["val_loss"] = 2.1 + 3.6 * math.exp(-step / 12)
            norms = [(1 + i) * 0.3 + 2 / step for i in range(layers)]
            row["grad_norms"] = {"embed": 0.05 + 1 / step, "blocks": norms, "head": 2.0 + 3 / step}
            row["param_norms"] = {
                "embed": 16.0 + step / 40,
                "blocks": [30.0 + i + step / 9 for i in range(layers)],
                "head": 25.0,
            }
            busy = [10 * spent * (0.9 + 0.02 * rank) for rank in range(ranks)]
            row["ranks"] = {"steps": 10, "busy_s": busy, "comm_s": [10 * spent - b for b in busy]}
            row["ranks"] |= {"data_s": [0.1] * ranks, "io_s": [0.0] * ranks, "straggler": None, "behind": 1.0}
        rows.append(row)
    return rows


def plan_of(speed, seq_len, batch, rows, scale, mesh, exact=True):
    """A prediction: equal to the record where it has to be, near it where it is an estimate."""
    step_s = batch * seq_len / (0.93 * speed)
    phases = {
        "forward": 0.3,
        "backward": 0.47,
        "update": 0.14,
        "comm_exposed": 0.06 if rows else 0.0,
        "data": 0.0,
        "io": 0.0,
        "rest": 0.03,
    }
    moments = timeline(scale)
    peak = max(moments, key=lambda m: m["bytes"])
    sums = {}
    for row in rows:
        sums[row["axis"]] = sums.get(row["axis"], 0) + row["bytes"]
    return {
        "state_bytes_per_rank": sum(STATE.values()),
        "peak_bytes_per_rank": peak["bytes"],
        "comm_bytes_per_axis": sums,
        "comm": rows,
        "flop_per_step": 25 * batch * seq_len * 1_000_000,
        "pass_flop_per_step": 24 * batch * seq_len * 1_000_000,
        "model_flop_per_step": 20 * batch * seq_len * 1_000_000,
        "step_s": step_s,
        "tokens_per_s": batch * seq_len / step_s,
        "mfu": 0.93 * speed * 2e7 / 2e11,
        "hfu": 1.2 * 0.93 * speed * 2e7 / 2e11,
        "num_params": 1_000_448,
        "tokens_per_step": batch * seq_len,
        "peak": peak,
        "timeline": moments,
        "state_bytes": dict(STATE),
        "time": {
            "phases": {n: x * step_s for n, x in phases.items()},
            "exposed": {a: 0.06 * step_s for a in sums},
            "hidden": {a: 0.05 * step_s for a in sums},
        },
        "device": {"name": "here", "measured": True},
    }


def make_run(
    folder, *, steps=40, dp=2, tp=1, speed=1500.0, preset="llama-tiny", batch=8, plan=True, old=False, table=None
):
    """Write a run folder; `old`: as runs before this version left it."""
    sizes = {"d_model": 64, "n_layers": 4, "d_ff": 128, "n_heads": 4, "n_kv_heads": 2} if preset != "gpt2-tiny" else {}
    given = {"preset": preset, "train": {"steps": steps, "batch": batch}, "data": {"seq_len": 128}, **(table or {})}
    if sizes:
        given["model"] = sizes
    mesh = {name: n for name, n in (("dp", dp), ("tp", tp)) if n > 1}
    value = from_table({**given, "mesh": mesh, "zero": 3 if dp > 1 else 0})
    folder.mkdir(parents=True)
    (folder / run_folder.CONFIG).write_text(config_table.to_json(value))
    said = {"fzero": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "platform": "Linux", "threads": 1}
    said |= {
        "command": ["/home/me/venv/bin/fzero", "pretrain", "--steps", str(steps)],
        "corpus": "/home/me/corpus",
        "corpus_sha256": "ab",
    }
    said |= {
        "tokenizer": "bytes",
        "eos": 0,
        "init": "",
        "num_params": 1_000_448,
        "flop_per_token": 2e7,
        "processes": dp * tp,
    }
    (folder / run_folder.ENVIRONMENT).write_text(json.dumps(said))
    rows = metrics(steps, batch, 128, dp * tp, speed, [*mesh])
    if old:
        new = ("wall_s", "phases", "comm", "grad_norms", "param_norms", "ranks", "hfu", "hfu_causal", "mfu_causal")
        rows = [{name: value for name, value in row.items() if name not in new} for row in rows]
    (folder / run_folder.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if old:
        return folder
    attempt = {
        "attempt": 1,
        "first_step": 0,
        "time": "2026-11-22T09:00:00Z",
        "command": said["command"],
        "config_sha256": "cd" * 32,
    }
    attempt |= {
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "dirty": False,
        "processes": dp * tp,
        "mesh": {"dp": dp, "tp": tp},
    }
    attempt |= {
        "zero": value.zero,
        "offload": "",
        "update": "end",
        "micro_batches": 2,
        "threads": 1,
        "compiled": False,
        "precision": "bf16",
    }
    attempt |= {
        "fp32_matmul": "default",
        "num_params": 1_000_448,
        "tokens_per_step": batch * 128,
        "flop_per_token": 2e7,
    }
    attempt |= {
        "flop_per_token_causal": 1.9e7,
        "hardware_flop_per_token": 2.4e7,
        "hardware_flop_per_token_causal": 2.3e7,
    }
    attempt |= {
        "peak_flops": 2e11,
        "peak_measured": True,
        "versions": {"fzero": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7"},
    }
    machine = {
        "cpu": "A Processor of Some Kind 9000",
        "cores": 2,
        "memory_bytes": 8_000_000_000,
        "system": "Linux 6.1",
        "host": "0123456789ab",
    }
    again = {**attempt, "attempt": 2, "first_step": 20, "time": "2026-11-22T09:10:00Z", "dirty": True}
    (folder / "attempts.jsonl").write_text(
        "".join(json.dumps({**a, "machine": machine, "kernels": "attention=blocked"}) + "\n" for a in (attempt, again))
    )
    found = ledger(dp, tp)
    (folder / "ledger.json").write_text(json.dumps({"attempt": 2, "step": 22, "rank": 0, "rows": found}))
    moments = timeline(1.0)
    peak = max(moments, key=lambda m: m["bytes"])
    memory = {
        "attempt": 2,
        "step": 22,
        "rank": 0,
        "components": COMPONENTS,
        "timeline": moments,
        "peak": peak,
        "state": STATE,
    }
    memory |= {
        "alive": [["blocks/w", "params", 800_000]],
        "allocator_peak_bytes": peak["bytes"] + 77_777,
        "rss_peak_bytes": 600_000_000,
    }
    (folder / "memory.json").write_text(
        json.dumps({**memory, "compiled": False, "not_seen": "scratch inside operators"})
    )
    if plan:
        (folder / "plan.json").write_text(json.dumps(plan_of(speed, 128, batch, found, 1.01, mesh)))
    return folder


def make_runs(folder):
    """Write four runs, of one to four ranks, under `folder`; the one named old is as an older version left it."""
    make_run(folder / "one", dp=1, speed=1000.0)
    make_run(folder / "zero3", dp=2, speed=1500.0)
    make_run(folder / "dp2tp2", dp=2, tp=2, speed=2100.0)
    make_run(folder / "old", dp=1, old=True)
    return folder

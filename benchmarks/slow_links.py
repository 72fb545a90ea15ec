"""Steps of ranks on two nodes with a slow link between them, with and without codecs, beside what a plan says of it.

    python benchmarks/slow_links.py --out benchmarks/results/slow-links.json

A node is a network namespace of Linux with two ranks; a pair of virtual devices joins the two, and the kernel's token
bucket (`tc`, tbf) limits what each sends. This needs root, `ip` and `tc`. Each form runs in processes of its own, and
its steps take turns: without a limit, with the largest rate, and so on.

`sent` are the bytes that each node sent the other in a step, with the headers of TCP; `planned_sent` what a rank sends
over each link by its plan (`sent_by_link`). `predicted` is the step of `fzero plan --gpu here --between RATE`, by what
`fzero bench` has measured of this machine; run it once before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from turns import write_run

NODES = ("fzero-a", "fzero-b")
ADDRESSES, DEVICE, PORT = ("10.77.0.1", "10.77.0.2"), "fz0", 29477
RANKS, UNLIMITED = 4, 1e5  # Gbit/s
FORMS = {  # (mesh, codec)
    "stage 3": ({"dp": 4}, ""),
    "stage 3, params=int8,grads=int4": ({"dp": 4}, "params=int8,grads=int4"),
    "replicas of nodes": ({"rp": 2, "dp": 2}, ""),
    "replicas of nodes, grads=int4": ({"rp": 2, "dp": 2}, "grads=int4"),
    "ZeRO++": ({"rp": 2, "dp": 2}, "params=int8,grads=int4,hpz"),
    "ZeRO++, loco": ({"rp": 2, "dp": 2}, "params=int8,grads=int4,hpz,loco"),
}
SIZES = {"d_model": 384, "n_layers": 6, "n_heads": 6, "n_kv_heads": 6, "d_ff": 1024, "vocab_size": 256, "max_len": 32}


def settings_of(codec: str) -> dict[str, Any]:
    """The settings of a form's run: few tokens, so that a step is what it sends and the update."""
    given = {f"model.{name}": size for name, size in SIZES.items()} | {"data.seq_len": 32, "zero": 3, "codec": codec}
    given |= {"train.batch": RANKS, "train.micro_batch": 1, "train.compiled": False, "precision.policy": "fp32"}
    return given | {"train.measure_every": 0, "train.memory_check": False, "optim.name": "adamw"}


# ---- the nodes -------------------------------------------------------------------------------------------------------


def sh(*words: str, check: bool = True) -> None:
    subprocess.run(words, check=check, stdout=subprocess.DEVNULL, stderr=None if check else subprocess.DEVNULL)


@contextlib.contextmanager
def two_nodes() -> Iterator[None]:
    """A context in which both network namespaces are there and reach each other."""
    try:
        for node in NODES:
            sh("ip", "netns", "delete", node, check=False)  # of a run that was killed
            sh("ip", "netns", "add", node)
        there = ["peer", "name", DEVICE, "netns", NODES[1]]
        sh("ip", "link", "add", DEVICE, "netns", NODES[0], "type", "veth", *there)
        for node, address in zip(NODES, ADDRESSES):
            sh("ip", "-n", node, "address", "add", f"{address}/24", "dev", DEVICE)
            sh("ip", "-n", node, "link", "set", DEVICE, "up")
            sh("ip", "-n", node, "link", "set", "lo", "up")
        yield
    finally:
        for node in NODES:
            sh("ip", "netns", "delete", node, check=False)


def limit(gigabits: float) -> None:
    """Limit what this node sends to so many Gbit/s; 0: no limit."""
    sh("tc", "qdisc", "delete", "dev", DEVICE, "root", check=False)
    if gigabits:
        rate = ["rate", f"{gigabits}gbit", "burst", "256kb", "latency", "200ms"]
        sh("tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *rate)


def passed() -> int:
    """The bytes that this node has sent to the other."""
    return int(Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes").read_text())


# ---- a rank ----------------------------------------------------------------------------------------------------------


def work(order: dict[str, Any]) -> dict[str, Any]:
    """A rank: {rate: ([seconds of each step], bytes that this node sent in a step)}."""
    import torch
    import torch.distributed as dist

    import fzero
    from fzero.planner.plan import config_for, device_for, resolve_for
    from fzero.run.setup import build
    from fzero.train.batch import local_batch

    torch.set_num_threads(1)
    sizes, codec = FORMS[order["form"]]
    mesh = fzero.make_mesh(sizes, device="cpu")
    config = resolve_for(replace(config_for("llama-tiny", settings_of(codec)), mesh=sizes), device_for("here"))
    job = build.build(config, mesh)
    state = build.first_state(job)
    rows = torch.randint(0, 256, (RANKS, 33), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}
    batch = local_batch(batch, mesh, build.local_micro_batches(config, mesh))
    found: dict[str, Any] = {str(rate): ([], []) for rate in order["rates"]}
    for repeat in range(order["repeats"] + 1):
        for rate in order["rates"]:
            if order["rank"] % 2 == 0:
                limit(rate)
            dist.barrier()
            before, begin = passed(), time.perf_counter()
            state, metrics = job.train_step(state, batch)
            dist.barrier()
            seconds = time.perf_counter() - begin
            if repeat:
                found[str(rate)][0].append(seconds), found[str(rate)][1].append(passed() - before)
    return {"found": found, "loss": float(metrics.loss)}


def measure(form: str, rates: list[float], repeats: int) -> list[dict[str, Any]]:
    """What each rank of a form found."""
    processes = []
    for rank in range(RANKS):
        order = {"form": form, "rates": rates, "repeats": repeats, "rank": rank}
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank % 2)}
        env |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)}
        env |= {"GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
        command = ["ip", "netns", "exec", NODES[rank // 2], sys.executable, __file__, "--rank", json.dumps(order)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env))
    texts = [process.communicate()[0] for process in processes]
    if failed := [process.returncode for process in processes if process.returncode]:
        sys.exit(f"slow_links.py: {form}: ranks ended with {failed}")
    return [json.loads(text.splitlines()[-1]) for text in texts]


# ---- what the plan says ----------------------------------------------------------------------------------------------


def planned(form: str, rates: list[float]) -> tuple[dict[str, float], dict[str, float]]:
    """({rate: the seconds of a step}, {link: the bytes that a rank sends over it in a step}). All ranks share the cores
    of this machine, and the ranks of a node half of what it moves between processes."""
    import fzero
    from fzero.planner.devices import between_nodes, device
    from fzero.planner.plan import config_for, plan
    from fzero.run.setup import build

    sizes, codec = FORMS[form]
    here = device("here")
    inside = here.links[0]
    inside = inside._replace(total_bytes_s=(inside.total_bytes_s or inside.bytes_s) / len(NODES))
    node = replace(here, links=(inside,), ranks_on_node=RANKS // len(NODES))
    config = config_for("llama-tiny", settings_of(codec))
    job = build.build(replace(config, mesh=sizes), fzero.fake_mesh(sizes))
    sent = {link: part + once for link, (part, once) in job.plan.sent_by_link().items()}
    links = {rate: replace(between_nodes(node, f"{rate or UNLIMITED}"), ranks_on_node=RANKS) for rate in rates}
    return {str(rate): plan(config, sizes, gpu=on).step_s or 0.0 for rate, on in links.items()}, sent


# ---- figures ---------------------------------------------------------------------------------------------------------


def figures(form: str, rates: list[float], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each rate of a form."""
    predicted, sent = planned(form, rates)
    rows = []
    for rate in rates:
        seconds = found[0]["found"][str(rate)][0]
        by_node = [statistics.median(found[rank]["found"][str(rate)][1]) for rank in (0, 2)]
        row = {"form": form, "gigabits": rate, "step_s": seconds, "median_s": statistics.median(seconds)}
        row |= {"spread": (max(seconds) - min(seconds)) / row["median_s"], "sent": by_node, "planned_sent": sent}
        row |= {"predicted_s": predicted[str(rate)], "loss": found[0]["loss"]}
        rows.append(row | {"measured_by_predicted": row["median_s"] / row["predicted_s"]})
    return rows


def planned_again(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a file with what the plan of this tree says of their steps."""
    rates = sorted({row["gigabits"] for row in rows})
    predicted = {form: planned(form, rates)[0] for form in {row["form"]: None for row in rows}}
    new = []
    for row in rows:
        seconds = predicted[row["form"]][str(row["gigabits"])]
        new.append(row | {"predicted_s": seconds, "measured_by_predicted": row["median_s"] / seconds})
    return new


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as text."""
    plain = {row["gigabits"]: row["median_s"] for row in rows if row["form"] == next(iter(FORMS))}
    head = f"{'form':34}{'Gbit/s':>8}{'step s':>9}{'spread':>8}{'predicted':>11}{'ratio':>7}{'sent MB':>9}{'gain':>7}"
    lines = [head]
    for row in rows:
        gain = plain.get(row["gigabits"], float("nan")) / row["median_s"]
        lines.append(
            f"{row['form']:34}{row['gigabits'] or 'none':>8}{row['median_s']:>9.3f}{row['spread']:>8.1%}"
            f"{row['predicted_s']:>11.3f}{row['measured_by_predicted']:>7.2f}{max(row['sent']) / 1e6:>9.2f}{gain:>7.2f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="10,1", help="Gbit/s of a node, each way; comma list")
    parser.add_argument("--forms", default=";".join(FORMS), help="separated by semicolons")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--plan-again", action="store_true", help="plan what --out has measured, and measure nothing")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        print(json.dumps(work(json.loads(given.rank))))
        return
    if given.plan_again:
        rows, before = planned_again(json.loads(given.out.read_text())["rows"]), os.getloadavg()
        print("\n".join(table(rows)))
        write_run(given.out, before, rows=rows)
        return
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        sys.exit("slow_links.py: network namespaces need root, ip and tc (iproute2)")
    before, rates, rows = os.getloadavg(), [0.0, *map(float, given.rates.split(","))], []
    with two_nodes():
        for form in given.forms.split(";"):
            rows += figures(form, rates, measure(form, rates, given.repeats))
            print("\n".join(table(rows)[:1] * (len(rows) == len(rates)) + table(rows)[-len(rates) :]), flush=True)
    if given.out:
        write_run(given.out, before, rows=rows)


if __name__ == "__main__":
    main()

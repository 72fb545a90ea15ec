"""Whole models for ten.py: GPT-2 124M and a Llama of 1B beside an nn.Module under torch.compile, their kernels, what
offload costs, and the plans of all these steps."""

from __future__ import annotations

import functools
import gzip
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peers import problem, torch_module
from peers.gpt2_module import GPT2
from ten_process import is_sticky
from ten_rows import (
    NEEDS_GPU,
    Rows,
    Where,
    allocated,
    forget,
    gist_of,
    memory,
    say,
    seconds_of,
    spread,
    synchronize,
    waits_of,
)

import fzero
from fzero.core import gpu
from fzero.kernels.registry import observe
from fzero.run.config.config_table import from_table
from fzero.run.measure.flops import token_flop
from fzero.run.setup import machine
from fzero.run.setup.build import Job, build, first_state
from fzero.train.capture import pop_news

HOST = "params=host,grads=host,opt=host"
PRESETS = {"124m": ("gpt2-124m", 32, 1024), "1b": ("llama-1b", 4, 4096)}  # batch, length
SIZES = {"1b": {"tied": False, "max_len": 4096}}  # as the nn.Module has it
ROOM = {"1b fzero": 16e9, "1b nn.Module": 12e9, "124m nn.Module": 20e9}  # bytes for compiling beside others
CONTENDERS: dict[str, dict[str, Any]] = {
    "fzero compiled": {},
    "fzero captured": {"capture": "auto"},
    "fzero eager": {"compiled": False},
    "fzero flash": {"kernels": "auto,attention=flash"},
}
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "acts": {"offload": "acts=host"},
    "params": {"offload": "params=host"},
    "opt": {"offload": "opt=host"},
    "all": {"offload": f"{HOST},acts=host"},
    "all speculate": {"offload": f"{HOST},acts=host", "update": "speculate"},
}
SMALL = {"vocab_size": 100, "max_len": 32, "d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 64}
TRACE_BYTES = 15 << 20


def table_of(model: str, batch: int = 0, offload: str = "", **train: Any) -> dict[str, Any]:
    """The table of a step's config: bf16, causal attention over whole sequences, as an nn.Module has it."""
    preset, its_batch, length = PRESETS[model]
    batch = batch or its_batch
    train = {"batch": batch, "micro_batch": batch, "measure_every": 0, "compiled": True} | train
    return {
        "preset": preset,
        "model": SIZES.get(model, {}),
        "data": {"seq_len": length, "within_documents": False},
        "train": train,
        "precision": {"policy": "bf16"},
        **({"offload": offload} if offload else {}),
    }


def tables() -> dict[str, dict[str, Any]]:
    """{"part: row": the table of its step} of all steps that stand beside a plan."""
    found = {f"124m: {name}": table_of("124m", **options) for name, options in CONTENDERS.items()}
    found["1b: fzero"] = table_of("1b")
    return found | {
        f"offload: {name}": table_of("1b", 8, remat="full", **options) for name, options in OFFLOADS.items()
    }


def write_plans(path: Path, commit: str) -> None:
    """Write what `fzero plan` says of these steps, by card, as JSON."""
    found: dict[str, Any] = {"commit": commit, "torch": torch.__version__, "plans": {}}
    for card in ("h100", "h200"):
        for name, table in tables().items():
            report = fzero.plan(table, gpu=card)
            found["plans"].setdefault(card, {})[name] = {
                "step_ms": 1e3 * (report.step_s or 0.0),
                "peak_bytes": report.peak_bytes_per_rank,
                "host_bytes": report.host_peak_bytes,
                "link": report.traffic.get("host", {}),
                "model_flop": report.model_flop_per_step,
                "model_flop_causal": report.model_flop_per_step_causal,
            }
            print(card, name, found["plans"][card][name], flush=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


# ---- a step of fzero, and of an nn.Module ----


def job_of(table: dict[str, Any], where: Where, layers: int = 0) -> Job:
    """The job of a table on this device; layers: of which so many, 0: all."""
    if where.tiny:
        grouped = {} if table["preset"].startswith("gpt2") else {"n_kv_heads": 1}
        train = {**table["train"], "batch": 2, "micro_batch": 2, "compiled": False}
        table = table | {
            "model": {**table["model"], **SMALL, **grouped},
            "data": {**table["data"], "seq_len": 32},
            "train": train,
        }
        table = table | {"precision": {"policy": "bf16", "fp32_matmul": "default"}}
    elif layers:
        table = table | {"model": {**table["model"], "n_layers": layers}}
    config = machine.resolve_here(replace(from_table(table), device=where.device))[0]
    return build(config, folder=where.folder, device=gpu.local_device(where.device))


def tokens_of(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and targets of a job's batch, the same for all contenders."""
    shape, generator = (job.config.train.batch, job.config.data.seq_len + 1), torch.Generator().manual_seed(1)
    rows = torch.randint(job.config.model.vocab_size, shape, generator=generator).to(job.device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Step:
    """A contender's step: calling it makes one and returns its loss, which nothing has waited for."""

    def __init__(self, job: Job, state: Any = None) -> None:
        tokens, targets = tokens_of(job)
        mask = torch.ones(targets.shape, dtype=torch.bool, device=job.device)
        self.job, self.batch = job, {"tokens": tokens, "targets": targets, "mask": mask}
        self.state, self.metrics = first_state(job) if state is None else state, None

    def __call__(self) -> torch.Tensor:
        self.state, self.metrics = self.job.train_step(self.state, self.batch)
        return self.metrics.loss


def module_step(job: Job, where: Where) -> Callable[[], torch.Tensor]:
    """The same step as people write it: an nn.Module under torch.compile and autocast, clipping, and a fused AdamW."""
    c: Any = job.config.model
    sizes = c.vocab_size, c.d_model, c.n_layers, c.n_heads, getattr(c, "n_kv_heads", 0), c.d_ff, c.max_len, c.norm_eps
    with job.device:  # where its numbers are drawn
        if job.config.preset.startswith("gpt2"):
            module: Any = GPT2(c)
        else:
            module = torch_module.Llama(problem.Config(*sizes, c.rope_theta))
    optimizer = torch.optim.AdamW(module.parameters(), 3e-4, (0.9, 0.95), 1e-8, 0.1, fused=True)
    forward = module if where.tiny else torch.compile(module)
    tokens, targets = tokens_of(job)

    def step() -> torch.Tensor:
        with torch.autocast(where.device, torch.bfloat16):
            loss = forward(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


class Contender:
    """A step, its times, and what it took of memory by itself."""

    def __init__(
        self, step: Callable[[], torch.Tensor], job: Job, where: Where, before: int = 0, steps: int = 3
    ) -> None:
        self.step, self.where = step, where
        self.issued: list[float] = []
        self.taken: list[float] = []
        with observe() as used:
            losses = [float(step()) for _ in range(steps)]  # compiled, and the last two alike
        if where.cuda:
            torch.cuda.reset_peak_memory_stats()
        step()
        synchronize(where.device)
        self.facts = memory(where.device)
        self.facts["own_bytes"] = self.facts["peak_bytes"] - before
        self.facts |= {"losses": losses, "kernels": {op: sorted(forms) for op, forms in used.items()}}
        flop = token_flop(job)
        self.tokens = job.config.train.batch * job.config.data.seq_len
        self.flop = {"full": flop.model * self.tokens, "causal": flop.model_causal * self.tokens}

    def turn(self) -> None:
        """One step, timed."""
        issued, taken = seconds_of(self.step, self.where.device)
        self.issued.append(issued)
        self.taken.append(taken)

    def row(self) -> dict[str, Any]:
        """Its figures so far. The report divides FLOP/s by the card's."""
        if not self.taken:
            return self.facts
        median = statistics.median(self.taken)
        return self.facts | {
            "tokens_per_s": self.tokens / median,
            "ms": spread(self.taken),
            "issued_ms": spread(self.issued),
            "flop_per_s": {kind: flop / median for kind, flop in self.flop.items()},
        }


def in_turns(contenders: dict[str, Contender], seconds: float, where: Where) -> None:
    """Steps of all contenders in turn; what one has so far is said every few seconds. One that fails goes on no
    further, and keeps its figures."""
    begin = told = time.perf_counter()
    rounds = 0
    while rounds < 9 or time.perf_counter() - begin < seconds:
        for one in contenders.values():
            if "cut" in one.facts:
                continue
            try:
                one.turn()
            except RuntimeError as error:
                if is_sticky(str(error)):
                    raise
                one.facts["cut"] = gist_of(error)
        rounds += 1
        if rounds == 3 or time.perf_counter() - told > 5:
            told = time.perf_counter()
            for name, one in contenders.items():
                say(row=name, **one.row(), last=False)
        if where.tiny:
            break


def gpt2_rows(where: Where) -> Rows:
    """GPT-2 124M: each contender is made, and said; then they take turns. The captured one has a state of its own, the
    others of fzero's update the same."""
    contenders: dict[str, Contender] = {}
    shared: list[Step] = []
    allocated_by_state: list[int] = []  # the first is that of the state which most of fzero's contenders share
    names = (*CONTENDERS, "nn.Module")

    def make(name: str) -> dict[str, Any]:
        tried.add(name)
        if name == "fzero flash" and not where.cuda:
            return {**NEEDS_GPU}
        forget(where.device)
        shares = bool(shared) and name in CONTENDERS and name != "fzero captured"
        before = allocated(where.device) - (allocated_by_state[0] if shares else 0)
        job = job_of(tables().get(f"124m: {name}", table_of("124m")), where)
        more: dict[str, Any] = {}
        if name == "nn.Module":
            step: Any = module_step(job, where)
        elif name == "fzero captured":
            step = Step(job)
            more = force_capture(step, where)
        else:
            step = Step(job, shared[0].state if shared else None)
            allocated_by_state.append(allocated(where.device) - before)
            shared.append(step)
            step = functools.partial(_of_shared, step, shared)
        contenders[name] = Contender(step, job, where, before)
        contenders[name].facts |= more
        return contenders[name].row()

    def measure(name: str) -> dict[str, Any]:
        for other in names:  # those of a process that has ended are made again
            if other not in tried and f"made: {other}" not in where.failed:
                make(other)
        if name == "fzero flash" and not where.cuda:
            return {**NEEDS_GPU}
        if name not in contenders:
            raise RuntimeError("it could not be made")
        if not taken:
            taken.append(True)
            in_turns(contenders, 12.0, where)
        return contenders[name].row()

    tried: set[str] = set()
    taken: list[bool] = []
    for name in names:
        yield f"made: {name}", functools.partial(make, name)
    for name in names:
        yield name, functools.partial(measure, name)


def _of_shared(step: Step, shared: list[Step]) -> torch.Tensor:
    loss = step()
    for other in shared:
        other.state = step.state
    return loss


def llama_rows(where: Where) -> Rows:
    """Llama 1B: fzero's steps, then, its state freed, the nn.Module's."""

    def measure(name: str) -> dict[str, Any]:
        before, job = allocated(where.device), job_of(table_of("1b"), where)
        one = Contender(Step(job) if name == "fzero" else module_step(job, where), job, where, before)
        in_turns({name: one}, 5.0, where)
        return one.row()

    for name in ("fzero", "nn.Module"):
        yield name, functools.partial(measure, name)


def compile_rows(where: Where) -> Rows:
    """What the later parts would compile, into the caches of the sitting. fzero compiles a block once for all layers;
    the nn.Module is compiled whole, in little memory: that its step then has no room is no failure."""
    model, _, name = where.name.removeprefix("compile ").partition(" ")

    def compile_all() -> dict[str, Any]:
        if where.cuda:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(ROOM.get(f"{model} {name}", 6e9) / total)
        job = job_of(table_of(model), where, layers=2 if name == "fzero" else 0)
        try:
            (Step(job) if name == "fzero" else module_step(job, where))()
            ended = "a step was made"
        except torch.OutOfMemoryError:
            ended = "compiled as far as its room went"
        # Block sizes that were timed beside other processes are no choice: they are timed again where it counts.
        cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) if where.cuda else where.folder
        timed = [*cache.rglob("*.best_config")]
        for file in timed:
            file.unlink(missing_ok=True)
        return {"ended": ended, "choices dropped": len(timed), "files": sum(1 for _ in cache.rglob("*.py"))}

    yield where.name, compile_all


# ---- kernels of a step, offload ----


def profile_rows(where: Where) -> Rows:
    """One profiled step of each model: its 20 largest kernels, and a trace that a browser shows."""
    for name in PRESETS:
        yield name, functools.partial(profile, name, where)


def profile(name: str, where: Where) -> dict[str, Any]:
    """The kernels of a step by their time on the device (on a CPU: operators by their own time)."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    step = Step(job_of(table_of(name), where))
    for _ in range(3):
        step()
    synchronize(where.device)
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * where.cuda]
    with profiler(activities=activities) as found:
        step()
        synchronize(where.device)
    key = "self_device_time_total" if where.cuda else "self_cpu_time_total"
    events = [one for one in found.key_averages() if getattr(one, key) > 0]
    if where.cuda:  # an operator has the time of the kernels that it launches: those alone are counted
        on_gpu = [one for one in events if one.device_type == torch.autograd.DeviceType.CUDA]
        events = [one for one in on_gpu if not getattr(one, "is_user_annotation", False)]
    events.sort(key=lambda one: -getattr(one, key))
    total = sum(getattr(one, key) for one in events)
    kernels = [[one.key[:90], one.count, round(getattr(one, key) / 1e3, 3)] for one in events[:20]]
    row: dict[str, Any] = {"kernels (name, calls, ms)": kernels, "ms of all": total / 1e3, "kinds": len(events)}
    raw, packed = where.folder / "trace.json", where.out / f"trace-{name}.json.gz"
    found.export_chrome_trace(str(raw))
    data = gzip.compress(raw.read_bytes(), 6)
    if len(data) < TRACE_BYTES:
        packed.write_bytes(data)
    return row | {"trace_bytes": len(data)}


def offload_rows(where: Where) -> Rows:
    """Steps of Llama 1B, recomputed, with states in the host's memory."""
    for name in OFFLOADS:
        yield name, functools.partial(offloaded, name, where)


def offloaded(name: str, where: Where) -> dict[str, Any]:
    """ms of a step, memory, and the lines at which the host waits."""
    before, job = allocated(where.device), job_of(tables()[f"offload: {name}"], where)
    step = Step(job)
    one = Contender(step, job, where, before, steps=2)
    say(row=name, **one.row(), last=False)
    for _ in range(1 if where.tiny else 4):
        one.turn()
    row = one.row() | {"waits": waits_of(step, where.device)}
    metrics: Any = step.metrics
    counts = [x for x in (metrics.speculated, metrics.put_right) if not isinstance(x, tuple)]
    return row | {"speculated, put right": [int(x) for x in counts]}


# ---- one graph a step ----


def force_capture(step: Step, where: Where) -> dict[str, Any]:
    """Let `capture=auto` decide, note that, and then have the steps captured whatever it was."""
    if not where.cuda:
        step()
        return {**NEEDS_GPU}
    captured: Any = step.job.train_step
    for _ in range(5):
        step()
    found = {"auto": [*captured.news], "issued, device s": captured.times, "refused": captured.refused}
    captured.news.clear()
    captured.captures = not captured.refused
    for _ in range(2):  # the first behind a step that was only issued is issued too
        step()
    if not captured.recorded:
        raise RuntimeError(f"no graph: {captured.refused or captured.news}; {found}")
    return found


def capture_rows(where: Where) -> Rows:
    """Small batches of GPT-2 124M, issued and as one graph; and a step that cannot be captured."""
    for batch in (1, 4, 8):
        yield f"batch {batch}", functools.partial(captured_steps, batch, where)
    yield "failed capture", functools.partial(failed_capture, where)


def captured_steps(batch: int, where: Where) -> dict[str, Any]:
    """ms of issued and of captured steps in turn, and whether their losses have the same bits."""
    steps = {mode: Step(job_of(table_of("124m", batch, capture=mode), where)) for mode in ("off", "auto")}
    losses: dict[str, list[torch.Tensor]] = {mode: [] for mode in steps}
    row = force_capture(steps["auto"], where)
    steps["auto"].state = first_state(steps["auto"].job)  # from the beginning, as the issued one
    taken: dict[str, list[float]] = {mode: [] for mode in steps}
    for i in range(4 if where.tiny else 16):
        for mode, step in steps.items():
            seconds = seconds_of(lambda step=step, mode=mode: losses[mode].append(step()), where.device)[1]
            taken[mode] += [seconds] * (i > 2)  # recorded again for the new state
    same = [*map(float, losses["off"])] == [*map(float, losses["auto"])]
    row |= {f"ms {mode}": spread(seconds) for mode, seconds in taken.items()} | memory(where.device)
    if not same:
        raise RuntimeError(f"losses of captured steps differ: {losses}; {row}")
    return row | {"same losses": same}


def failed_capture(where: Where) -> dict[str, Any]:
    """A model that waits for the device cannot be captured: the steps behind the attempt go on, with the bits of issued
    ones, on the stream that was current."""
    config = fzero.models.GPT2Config(**SMALL)
    model = fzero.models.build(config)
    plan, tx = fzero.zero_plan(0, model, fzero.one_process()), fzero.optim.adamw(1e-3)

    def head(params: Any, x: Any, batch: Any, ctx: Any) -> Any:
        if float(x.detach().float().sum()) == 1e30:
            raise AssertionError("it is never so large")
        return model.head(params, x, batch, ctx)

    tokens = torch.randint(config.vocab_size, (2, config.max_len), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": tokens.to(where.device), "targets": tokens.to(where.device)}
    losses, news = {}, []
    for mode in ("off", "auto"):
        execution = fzero.Execution(capture=mode)
        step: Any = fzero.make_train_step(model._replace(head=head), tx, plan, execution=execution)
        state, losses[mode] = fzero.init_state(model, tx, plan, seed=0, device=where.device), []
        for i in range(8):
            if mode == "auto" and i == 5 and where.cuda:
                step.captures = True  # whatever was decided
            state, metrics = step(state, batch)
            losses[mode].append(float(metrics.loss))
        news += pop_news(step)
    row: dict[str, Any] = {"news": news, "same losses": losses["off"] == losses["auto"]}
    if where.cuda:
        row["stream is the default one"] = torch.cuda.current_stream() == torch.cuda.default_stream()
    if not all(value for value in row.values() if isinstance(value, bool)):
        raise RuntimeError(f"{row}; {losses}")
    return row if where.cuda else row | NEEDS_GPU

"""Fourteen questions about a run, each answered by a few plans that differ in one thing.

`answer("remat", config, ...)` is an Answer: a table whose rows are plans, exact in memory, and a line that says what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fzero import models
from fzero.core.pytree import nearest
from fzero.models.presets import family_of
from fzero.planner import devices
from fzero.planner.candidates import groups_of, sizes_of_tp
from fzero.planner.devices import Device
from fzero.planner.format import duration, mesh_words, percent, place, quantity, size
from fzero.planner.plan import PlanReport, config_for, device_for, sizes_of
from fzero.planner.search import seconds_of
from fzero.planner.variants import Answer, Asked, Variant, beside, fastest, largest, numbers, reason, vary
from fzero.run.config import RunConfig


def answer(
    name: str,
    model: str | RunConfig | Mapping[str, Any],
    mesh: Mapping[str, int] | None = None,
    *,
    gpu: str | Device = "h100",
    gpus: int | None = None,
    tokens: float | None = None,
    price: float | None = None,
    ranks_on_node: int | None = None,
    rank: int = 0,
) -> Answer:
    """The Answer to the question `name` (see QUESTIONS) about a run; the arguments are those of `plan`.

    gpus: the ranks that "mesh" divides up. Raises ValueError for an unknown question, and for what a run would refuse.
    """
    if name not in QUESTIONS:
        raise ValueError(f"question {name!r} is not known{nearest(name, QUESTIONS)}; the questions are {', '.join(QUESTIONS)}")
    config = config_for(model)
    options = {"tokens": tokens, "price": price, "ranks_on_node": ranks_on_node, "rank": rank}
    asked = Asked(config, sizes_of(config, mesh), device_for(gpu), options, gpus)
    text, function = QUESTIONS[name]
    return function(text, asked)


def listing() -> str:
    """The questions, a line each."""
    width = max(map(len, QUESTIONS))
    return "\n".join(f"{name:{width}}  {text}" for name, (text, _) in QUESTIONS.items())


def ask_peak(question: str, asked: Asked) -> Answer:
    """Bytes of a rank in each phase."""
    r = asked.plan()
    rows = []
    for phase, peak in r.phases.items():
        moment = max((m for m in r.timeline if m["phase"] == phase), key=lambda m: m["bytes"])
        parts = sorted(moment["components"].items(), key=lambda each: -each[1])
        rows.append([phase or "-", size(peak), place(moment), ", ".join(f"{name} {size(n)}" for name, n in parts[:4])])
    verdict = f"fits with {size(r.margin_bytes)} to spare" if r.fits else f"does not fit: {r.too_much()}"
    says = f"{size(r.peak_bytes_per_rank)} of {size(r.capacity_bytes)}, in {place(r.peak)}; {verdict}"
    values = [{"phase": phase, "bytes": n} for phase, n in r.phases.items()]
    return Answer(question, says, ["phase", "peak", "where", "of it"], rows, values, text=(0, 2, 3))


def ask_leaf(question: str, asked: Asked) -> Answer:
    """What is alive at the peak, largest first."""
    r = asked.plan()
    found = r.peak["largest"]
    rows = [[name, component, size(n), percent(n / r.peak_bytes_per_rank)] for name, component, n in found]
    says = f"{found[0][0]} ({found[0][1]}): {size(found[0][2])} of {size(r.peak_bytes_per_rank)} at the peak, in {place(r.peak)}"
    values = [dict(zip(("name", "component", "bytes"), each)) for each in found]
    return Answer(question, says, ["tensor", "component", "bytes", "of the peak"], rows, values, text=(0, 1))


def ask_remat(question: str, asked: Asked) -> Answer:
    """Recomputation."""
    variants = vary(asked, [(f"remat {text}", {"train.remat": text}, None) for text in ("none", "selective:0.5", "every:2", "full")])
    return beside(question, fastest(variants), "remat", variants)


def ask_offload(question: str, asked: Asked) -> Answer:
    """Offload."""
    choices = [("nothing", {"offload": ""}, None), *((text, {"offload": text}, None) for text in ("opt=host", "params=host,opt=host"))]
    choices.append(("acts=host, remat full", {"offload": "acts=host", "train.remat": "full"}, None))
    if asked.device.nvme or not asked.device.flops:
        choices.append(("params=nvme,opt=nvme", {"offload": "params=nvme,opt=nvme"}, None))
    variants = vary(asked, choices)
    return beside(question, fastest(variants), "offload", variants)


def ask_micro_batch(question: str, asked: Asked) -> Answer:
    """The largest micro-batch, with at most two of them a step (so that gradients are summed where the config sums them)."""
    pieces = min(2, max(1, asked.config.train.batch // asked.config.train.micro_batch // asked.data))

    def of(rows: int) -> PlanReport:
        return asked.plan({"train.batch": rows * asked.data * pieces, "train.micro_batch": rows})

    n, variants = largest(of, 1, 1 << 20)
    says = f"{n} sequences of {asked.config.data.seq_len:,} at a time" if n else "not even one sequence fits"
    return beside(question, says, "micro-batch", variants)


def ask_seq_len(question: str, asked: Asked) -> Answer:
    """The longest sequence, one at a time, in steps of 256 (or of the config's, where that is shorter)."""
    step = min(256, asked.config.data.seq_len) * (asked.sizes.get("tp", 1) if asked.config.sequence else 1)

    def of(steps: int) -> PlanReport:
        length = steps * step
        longer = {"model.max_len": max(length, asked.config.model.max_len)}
        return asked.plan({**longer, "data.seq_len": length, "train.batch": asked.data, "train.micro_batch": 1})

    n, variants = largest(of, max(1, asked.config.data.seq_len // step), 1 << 20)
    named = [Variant(f"{int(v.name.replace(',', '')) * step:,}", v.report, v.why) for v in variants]
    says = f"{n * step:,} tokens, one sequence at a time" if n else f"not even {step:,} tokens fit"
    return beside(question, says, "seq-len", named)


def ask_gpus(question: str, asked: Asked) -> Answer:
    """The fewest devices, by doubling dp; tp stays."""
    tp, variants, dp = asked.sizes.get("tp", 1), [], 1
    while dp <= asked.config.train.batch // asked.config.train.micro_batch and (
        not variants or not (variants[-1].report and variants[-1].report.fits)
    ):
        variants += vary(asked, [(f"{dp * tp}", {}, {"dp": dp, "tp": tp})])
        dp *= 2
    last = variants[-1]
    fits = last.report is not None and last.report.fits
    says = f"{last.name} of them, as {mesh_words(last.report.mesh)} at stage {asked.config.zero}" if fits else "none that the batch allows"
    return beside(question, says, "devices", variants)


def ask_model(question: str, asked: Asked) -> Answer:
    """The largest model: of the family's presets, and then of more layers."""
    family = family_of(asked.config.model)
    presets = sorted(
        (models.num_params(models.build(make())), name) for name, make in models.PRESETS.items() if family_of(make()) == family
    )
    variants: list[Variant] = []
    low, high = 0, len(presets)

    def of(preset: str, layers: int | None = None) -> PlanReport:
        model = models.preset(preset)
        model = replace(model, max_len=max(model.max_len, asked.config.data.seq_len), n_layers=layers or model.n_layers)
        return asked._replace(config=replace(asked.config, preset="", model=model)).plan()

    while low < high:
        middle = (low + high) // 2
        report = of(presets[middle][1])
        variants.append(Variant(presets[middle][1], report))
        low, high = (middle + 1, high) if report.fits else (low, middle)
    if not low:
        return beside(question, f"not even {presets[0][1]} fits", "model", variants)
    name = presets[low - 1][1]
    usual = models.preset(name).n_layers
    layers, deeper = largest(lambda n: of(name, n), usual, 8 * usual)
    variants += [Variant(f"{name}, {v.name} layers", v.report) for v in deeper]
    best = next(v.report for v in deeper if v.name == f"{layers:,}")
    says = f"{quantity(best.num_params)} parameters: {name} with {layers} layers instead of {usual}"
    return beside(question, says, "model", sorted(variants, key=lambda v: v.report.num_params))


def ask_stage(question: str, asked: Asked) -> Answer:
    """ZeRO stages."""
    variants = vary(asked, [(f"stage {stage}", {"zero": stage}, None) for stage in range(4)])
    return beside(question, fastest(variants), "stage", variants)


def ask_mesh(question: str, asked: Asked) -> Answer:
    """Meshes of as many ranks; where tp divides a sequence, with and without splitting it."""
    node = asked.options["ranks_on_node"] or min(asked.ranks, asked.device.links[0].ranks or asked.ranks)
    choices: list[tuple[str, dict[str, Any], dict[str, int]]] = []
    for tp in sizes_of_tp(asked.config, asked.ranks, node):
        data = asked.ranks // tp
        for dp in groups_of(data, max(1, node // tp)) if asked.config.zero else [data]:
            sizes = {name: n for name, n in (("dp", dp), ("rp", data // dp), ("tp", tp)) if n > 1}
            choices.append((mesh_words(sizes), {"sequence": False}, sizes))
            if tp > 1 and asked.config.data.seq_len % tp == 0:
                choices.append((f"{mesh_words(sizes)}, sequence", {"sequence": True}, sizes))
    variants = vary(asked, choices)
    return beside(question, fastest(variants), "mesh", variants)


REMEDIES: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "params": (("stage 3", {"zero": 3}), ("params on the host", {"offload": "params=host"})),
    "master": (("stage 3", {"zero": 3}), ("states on the host", {"offload": "opt=host"})),
    "optimizer": (
        ("8-bit states", {"optim.states": "8bit"}),
        ("states on the host", {"offload": "opt=host"}),
        ("lion", {"optim.name": "lion"}),
    ),
    "grads": (("stage 2", {"zero": 2}), ("stage 3", {"zero": 3})),
    "gathered": (("nothing gathered ahead", {"prefetch": 0}), ("stage 2", {"zero": 2})),
    "activations": (("remat selective:0.5", {"train.remat": "selective:0.5"}), ("remat full", {"train.remat": "full"})),
    "workspace": (("MLP in 4 parts", {"train.mlp_tiles": 4}),),
    "compute": (("float8 products", {"precision.policy": "float8"}), ("remat none", {"train.remat": "none"})),
    "memory": (("compiled blocks", {"train.compiled": True}),),
    "host": (("compiled blocks", {"train.compiled": True}),),
    "communication on dp": (("stage 2", {"zero": 2}), ("gradients summed before they are sent", {"accumulate": "full"})),
    "communication on tp": (("sequence parallel", {"sequence": True}),),
    "nvme": (("states in memory", {"offload": ""}), ("8-bit states", {"optim.states": "8bit"})),
}


def ask_binds(question: str, asked: Asked) -> Answer:
    """What binds memory and time, and what changes do to it."""
    r = asked.plan()
    share = r.peak["components"][r.memory_binds] / r.peak_bytes_per_rank
    says = f"memory: {r.memory_binds}, {percent(share)} of the peak"
    choices = [(text, change, None) for text, change in REMEDIES.get(r.memory_binds, ())]
    if r.step_s is not None:
        parts = {**r.time["bound"], **seconds_of(r)}
        binds = r.time["binds"]
        took = parts.get(binds) or r.time["exposed"].get(binds.removeprefix("communication on "), 0.0) or r.time["waiting"].get(binds, 0.0)
        says += f"; time: {binds}, {percent(took / r.step_s)} of the step"
        choices += [(text, change, None) for text, change in REMEDIES.get(binds, ())]
        rows = asked.config.train.micro_batch
        for text, micro in (("micro-batch halved", rows // 2), ("micro-batch doubled", rows * 2)):
            if micro and asked.config.train.batch % (micro * asked.data) == 0:
                choices.append((text, {"train.micro_batch": micro}, None))
    changed = [c for c in choices if any(value(asked.config, key) != new for key, new in c[1].items())]
    variants = [Variant("as it is", r), *vary(asked, changed)]
    return beside(question, says, "change", variants)


def value(config: RunConfig, key: str) -> Any:
    """The value of a dotted name of a config."""
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def ask_cost(question: str, asked: Asked) -> Answer:
    """Days and cost of a budget of tokens, on fewer and more data ranks."""
    tokens = asked.options["tokens"]
    if tokens is None:
        raise ValueError("--ask cost needs --tokens, such as 1e12")
    dp, rows, values = asked.sizes.get("dp", 1), [], []
    for n in (dp // 2, dp, 2 * dp, 4 * dp):
        if not n:
            continue
        (v,) = vary(asked, [(str(n), {}, {**asked.sizes, "dp": n})])
        if v.report is None or v.report.days is None:
            rows.append([mesh_words({**asked.sizes, "dp": n}), *["-"] * 6, v.why.split(";")[0][:80] or "the device has no rates"])
            continue
        r = v.report
        cost = f"{r.cost:,.0f}" if r.cost is not None else "-"
        cells = [quantity(r.tokens_per_s), percent(r.mfu), duration(r.days * 86400), f"{r.device_hours:,.0f}", cost]
        rows.append([mesh_words(r.mesh), str(r.ranks), *cells, reason(v)])
        values.append({**numbers(r), "days": r.days, "device_hours": r.device_hours, "cost": r.cost})
    says = f"{quantity(tokens)} tokens in batches of {asked.config.train.batch:,} sequences of {asked.config.data.seq_len:,}"
    return Answer(question, says, ["mesh", "devices", "tokens/s", "MFU", "time", "device hours", "cost", ""], rows, values)


def ask_precision(question: str, asked: Asked) -> Answer:
    """Dtypes of parameters and of optimizer states, and optimizers."""
    name, choices = asked.config.optim.name, []
    for policy in ("fp32", "bf16"):
        choices.append((f"{policy}, {name}", {"precision.policy": policy, "optim.states": "full"}, None))
    if name in ("adamw", "adam", "lion"):
        for states in ("bf16", "8bit"):
            choices.append((f"bf16, {name}, {states} states", {"precision.policy": "bf16", "optim.states": states}, None))
    variants = vary(asked, choices)
    for other in ("lion", "muon", "adafactor"):
        if other != name:
            changed = asked._replace(config=replace(asked.config, optim=replace(asked.config.optim, name=other, states="full")))
            variants += [Variant(f"bf16, {other}", v.report, v.why) for v in vary(changed, [("", {"precision.policy": "bf16"}, None)])]
    return beside(question, fastest(variants), "precision", variants)


def ask_gpu(question: str, asked: Asked) -> Answer:
    """The same run on every device that is known."""
    variants = []
    for name in [*devices.listed(), *(["here"] if devices.here().is_file() else [])]:
        try:
            variants.append(Variant(name, asked.plan(device=devices.device(name))))
        except ValueError as error:
            variants.append(Variant(name, None, str(error)))
    return beside(question, fastest(variants), "device", variants)


QUESTIONS: dict[str, tuple[str, Callable[[str, Asked], Answer]]] = {
    "peak": ("What does a rank need at most, and in which phase?", ask_peak),
    "leaf": ("Which tensors are the largest at the peak?", ask_leaf),
    "remat": ("What does each choice of recomputation save and cost?", ask_remat),
    "offload": ("What does each choice of offload save and cost?", ask_offload),
    "micro-batch": ("How many sequences at a time fit?", ask_micro_batch),
    "seq-len": ("How long may a sequence be?", ask_seq_len),
    "gpus": ("How few devices does it fit on?", ask_gpus),
    "model": ("How large a model of this kind fits?", ask_model),
    "stage": ("Which ZeRO stage?", ask_stage),
    "mesh": ("Which mesh, and what do tp and sequence parallelism save?", ask_mesh),
    "binds": ("What binds, and what would relieve it?", ask_binds),
    "cost": ("How long and how dear are so many tokens, on fewer and more devices?", ask_cost),
    "precision": ("What do precision and optimizer states make of it?", ask_precision),
    "gpu": ("What would it be on other devices?", ask_gpu),
}

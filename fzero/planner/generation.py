"""Generation before it runs: `fzero plan --ask generate` and `--ask serve`.

Bytes of weights and pages are those of the plan's leaves and of a PageSpec, exactly. What a step needs beside them is
traced, of the fullest step that a budget of tokens allows: a row for each request but one, and a chunk of its prompt.
Pages take what is left. Times are rooflines, see generation_costs.py.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fzero.core.arguments import checked
from fzero.core.config_tables import Positive, check_choice
from fzero.generate import CACHES, PAGE_TOKENS, RECORDED_TOKENS, PageSpec, expect_generates, page_spec, pages_for
from fzero.models import Model, ModelConfig
from fzero.models.base import leaf_shapes
from fzero.models.configs import DecoderConfig, body_of, frozen_leaves
from fzero.planner import generation_text
from fzero.planner.devices import Device
from fzero.planner.generation_costs import Rows, StepCosts, StepTime
from fzero.planner.generation_trace import trace_rows
from fzero.planner.plan import config_for, device_for, resolve_for, sizes_of, with_host_memory
from fzero.planner.plan_report import has_rates
from fzero.planner.step_trace import shared_mesh, shared_model
from fzero.run.config.run_config import RunConfig
from fzero.run.setup.build_optim import make_policy
from fzero.sharding import Plan, zero_plan
from fzero.sharding.spec import MEMORIES, Offload

NEAR_BEST = 0.99  # of the most tokens/s: the smallest batch that has so much is the best
MOST_ROWS = 1 << 20  # of a step, to hide a link behind
TRACED_ROWS = 2, 4  # of the steps whose operators are counted: a product of one row alone may take others
ROUNDS = 200  # of a fixed point


class Workload(NamedTuple):
    """What is asked for: the lengths of requests, and the tokens that a step may have.

    >>> Workload(prompt_tokens=512, new_tokens=128).tokens
    640
    """

    prompt_tokens: int = 512
    new_tokens: int = 128
    step_tokens: int = 512  # tokens of a step: one of each running request, the rest of prompts
    page_tokens: int = PAGE_TOKENS
    cache: str = "auto"  # what keys and values are in, as of `GenerateOptions`

    @property
    def tokens(self) -> int:
        """The positions of a finished request."""
        return self.prompt_tokens + self.new_tokens

    @property
    def context(self) -> int:
        """The positions of a request that is being answered, on the average."""
        return self.prompt_tokens + (self.new_tokens + 1) // 2

    def fullest(self, requests: int) -> tuple[Rows, ...]:
        """The rows of the step with the most tokens of so many requests."""
        chunk = min(self.prompt_tokens, max(1, self.step_tokens - requests + 1))
        rows = (Rows(1, self.tokens - 1, requests - 1), Rows(chunk, self.prompt_tokens))
        return rows if requests > 1 else rows[1:]

    def chunks(self) -> list[Rows]:
        """The steps of a prompt alone."""
        ends = [*range(self.step_tokens, self.prompt_tokens, self.step_tokens), self.prompt_tokens]
        return [Rows(end - begin, end) for begin, end in zip([0, *ends], ends)]


class GenerationPlan(NamedTuple):
    """What generation takes on a rank, and how fast it is."""

    config: RunConfig  # with every "auto" resolved
    device: Device
    sizes: dict[str, int]  # of all axes of the mesh
    workload: Workload
    num_params: int
    capacity_bytes: int  # of a rank's device, for tensors
    weight_bytes: dict[str, int]  # at rest, by memory: "device", "host", "nvme": exact
    spec: PageSpec  # of the pages that fit beside: page_bytes and bytes are exact
    position_bytes: int  # of a position in all layers: exact
    step_bytes: int  # of the fullest step beside weights and pages
    longest: int  # positions of a request alone
    batch: int  # requests of the asked lengths whose pages fit at a time; 0: not one
    best: int  # the smallest batch with nearly the most tokens/s
    hiding: int | None  # the smallest batch whose computation takes as long as the weights' way; None: they rest here
    costs: StepCosts

    @property
    def fits(self) -> bool:
        """Whether a request of the asked lengths fits, and the weights that rest in the host's memory do."""
        capacity = self.device.host_capacity_bytes(self.device.on_node(math.prod(self.sizes.values())))
        return self.batch > 0 and self.weight_bytes["host"] <= (math.inf if capacity is None else capacity)

    @property
    def peak_bytes(self) -> int:
        """The most bytes on the device with all pages in use."""
        return self.weight_bytes["device"] + self.step_bytes + self.spec.bytes

    @property
    def replicas(self) -> int:
        """The ranks that have requests of their own."""
        return self.sizes.get("dp", 1) * self.sizes.get("rp", 1)

    @property
    def timed(self) -> bool:
        """Whether the rates of the device are known."""
        return has_rates(self.device)

    def decode(self, batch: int) -> StepTime:
        """The time of a step that draws a token for each of so many requests, half of their answers there."""
        return self.costs.time([Rows(1, self.workload.context, batch)])

    def tokens_per_s(self, batch: int) -> float:
        """The tokens/s of all ranks while so many requests a rank are answered: batch / seconds of a step."""
        return self.replicas * batch / self.decode(batch).seconds

    @property
    def first_token_s(self) -> float:
        """The seconds of a prompt alone, chunk by chunk."""
        *chunks, last = self.workload.chunks()
        return sum(self.costs.time([chunk], 0).seconds for chunk in chunks) + self.costs.time([last]).seconds

    def batches(self) -> list[int]:
        """Batches to look at: powers of two, the best, and the largest that fits."""
        powers = [1 << i for i in range(max(1, self.batch).bit_length())]
        return sorted({*powers, *[n for n in (self.best, self.batch, self.hiding) if n]})

    def to_table(self) -> dict[str, Any]:
        """The values as a table; bytes are of a rank."""
        rows = [
            {"batch": n, "tokens_per_s": self.tokens_per_s(n), "step_s": self.decode(n).seconds}
            | {"fits": n <= self.batch, "binds": self.decode(n).binds, **self.decode(n)._asdict()}
            for n in (self.batches() if self.timed else ())
        ]
        facts = {
            "device": self.device.name,
            "mesh": {axis: size for axis, size in self.sizes.items() if size > 1},
            "workload": self.workload._asdict(),
            "num_params": self.num_params,
            "fits": self.fits,
            "capacity_bytes": self.capacity_bytes,
            "weight_bytes": self.weight_bytes,
            "position_bytes": self.position_bytes,
            "page_bytes": self.spec.page_bytes,
            "pages": self.spec.count,
            "pages_bytes": self.spec.bytes,
            "step_bytes": self.step_bytes,
            "peak_bytes": self.peak_bytes,
            "longest": self.longest,
            "batch": self.batch,
            "best_batch": self.best,
            "hiding_batch": self.hiding,
            "first_token_s": self.first_token_s if self.timed else None,
            "decode": rows,
        }
        return facts

    def to_json(self) -> str:
        """Format as one JSON object."""
        return json.dumps(self.to_table(), indent=1)

    def __str__(self) -> str:
        return generation_text.page(self)


class ServingPlan(NamedTuple):
    """What a rate of requests makes of a GenerationPlan: steps of b rows and c tokens of prompts that take t seconds,
    with b = rate x new tokens x t and c = rate x prompt tokens x t (Little 1961), the least t for which that holds.

    It is stable if the b requests' pages fit and b + c is within the budget of a step; utilisation is the rate over the
    largest stable one.
    """

    generation: GenerationPlan
    rate: float  # requests a second, of all ranks
    largest_rate: float  # that is stable
    step_s: float  # of a step at this rate; inf: no step keeps up
    rows: float  # requests of a rank that are being answered
    prompt_tokens: float  # of prompts in a step
    pages: float  # in use
    first_token_s: float  # of a request that waits for nobody

    @property
    def stable(self) -> bool:
        """Whether the queue does not grow without end."""
        return self.rate <= self.largest_rate

    @property
    def utilisation(self) -> float:
        """The rate over the largest stable one."""
        return self.rate / self.largest_rate if self.largest_rate else math.inf

    @property
    def answer_s(self) -> float:
        """The seconds of a request, its first token among them."""
        return self.first_token_s + self.generation.workload.new_tokens * self.step_s

    def to_json(self) -> str:
        """Format as one JSON object; what has no bound is null."""
        names = ("rate", "largest_rate", "step_s", "rows", "prompt_tokens", "pages", "first_token_s", "answer_s")
        values = {name: getattr(self, name) for name in (*names, "utilisation")}
        facts = {name: value if math.isfinite(value) else None for name, value in values.items()}
        return json.dumps(self.generation.to_table() | {"serve": {"stable": self.stable, **facts}}, indent=1)

    def __str__(self) -> str:
        return generation_text.serving_page(self)


@checked()
def plan_generation(
    model: str | ModelConfig | RunConfig | Mapping[str, Any],
    mesh: Mapping[str, int] | None = None,
    *,
    gpu: str | Device = "h100",
    settings: Mapping[str, Any] | None = None,
    workload: Workload = Workload(),  # noqa: B008  (a value)
    say: Callable[[str], None] = lambda stage: None,
) -> GenerationPlan:
    """Predict the memory and time of generation on a mesh of dp, rp and tp, without its devices and its weights.

    model, mesh, gpu, settings: as of `fzero.plan`: the precision is that of weights, pages and products, a quantized
    model's weights rest in codes, and `offload` says where the weights are, such as "params=host" or "params=nvme".
    workload: lengths of requests and the budget of a step. say: called with the text of each stage of the work.
    Bytes are of a rank. Raises ValueError for a mesh with other axes, lengths beyond the model's max_len, a budget
    below a page, a model with a head of scores, and one that transformers' code computes.

    >>> answer = plan_generation("llama-tiny", gpu="h100", settings={"precision.policy": "bf16"})
    >>> answer.weight_bytes["device"] == 2 * answer.num_params, answer.spec.page_bytes == 16 * answer.position_bytes
    (True, True)

    Ref: Kwon et al. 2023, arXiv:2309.06180, section 4.1 (pages); Holmes et al. 2024, "DeepSpeed-FastGen",
    arXiv:2401.08671, section 4 (a budget of tokens a step).
    """
    config = config_for(model, settings)
    device = with_host_memory(device_for(gpu), config)
    sizes, config = sizes_of(config, mesh), resolve_for(config, device)
    built, plan = model_and_plan(config, sizes)
    expect_workload(workload, built.config.max_len)
    share = device.on_node(math.prod(sizes.values())) if device.kind == "cpu" else 1
    memory = FreeMemory(built, plan, device, workload, device.capacity_bytes // share)
    say("tracing steps")
    batch, step_bytes = memory.requests()
    ops = [memory.trace((Rows(1, workload.context, count),)).ops for count in TRACED_ROWS]
    more = max(0.0, (ops[1] - ops[0]) / (TRACED_ROWS[1] - TRACED_ROWS[0]))  # for each row
    costs = StepCosts(built, plan, memory.spec, device, (ops[0] - more * (TRACED_ROWS[0] - 1), more))
    timed = has_rates(device)
    answer = GenerationPlan(
        config=config,
        device=device,
        sizes=dict(plan.mesh.sizes),
        workload=workload,
        num_params=sum(map(math.prod, leaf_shapes(built).values())),
        capacity_bytes=memory.capacity,
        weight_bytes=memory.weights,
        spec=replace(memory.spec, count=max(1, memory.pages(step_bytes))),
        position_bytes=sum(costs.position_bytes),
        step_bytes=step_bytes,
        longest=memory.longest(),
        batch=batch,
        best=batch,
        hiding=None,
        costs=costs,
    )
    return answer._replace(best=best_batch(answer), hiding=hiding_batch(answer)) if timed else answer


@checked()
def plan_serving(
    model: str | ModelConfig | RunConfig | Mapping[str, Any],
    rate: Positive,
    mesh: Mapping[str, int] | None = None,
    **options: Any,
) -> ServingPlan:
    """Predict what becomes of so many requests a second: pages in use, seconds of an answer, whether a queue is stable.

    model, mesh, options: as of `plan_generation`, whose errors it raises, and ValueError for a device without rates.

    >>> answer = plan_serving("llama-tiny", 5.0, settings={"precision.policy": "bf16"})
    >>> answer.stable, answer.rows < answer.generation.batch
    (True, True)

    Ref: Little 1961, "A proof for the queuing formula L = lambda W"; Holmes et al. 2024, arXiv:2401.08671, section 4.
    """
    return serve(plan_generation(model, mesh, **options), rate)


def serve(plan: GenerationPlan, rate: float) -> ServingPlan:
    """The ServingPlan of a GenerationPlan; raises ValueError for a device without rates."""
    if not plan.timed:
        raise ValueError(f"serving needs the rates of {plan.device.name}; run fzero bench first")
    low, high = 0.0, 1.0
    while steady_step(plan, high) < math.inf and high < MOST_ROWS:
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if steady_step(plan, middle) < math.inf else (low, middle)
    work, step_s = plan.workload, steady_step(plan, rate / plan.replicas)
    if step_s == math.inf:
        return ServingPlan(plan, rate, low * plan.replicas, step_s, *[math.inf] * 4)
    per_rank = rate / plan.replicas
    rows, prompts = per_rank * work.new_tokens * step_s, per_rank * work.prompt_tokens * step_s
    first_s = math.ceil(work.prompt_tokens / max(1.0, work.step_tokens - rows)) * step_s
    pages = rows * pages_for(work.context, work.page_tokens)
    pages += per_rank * first_s * pages_for(work.prompt_tokens, work.page_tokens)
    return ServingPlan(plan, rate, low * plan.replicas, step_s, rows, prompts, pages, first_s)


def steady_step(plan: GenerationPlan, rate: float) -> float:
    """The seconds of a step of a rank that keeps up with a rate of requests; inf if none does."""
    work, seconds = plan.workload, 0.0
    for _ in range(ROUNDS):
        rows, prompts = rate * work.new_tokens * seconds, rate * seconds
        if rows > plan.batch or rows + prompts * work.prompt_tokens > work.step_tokens:
            return math.inf
        step = [Rows(1, work.context, rows), Rows(work.prompt_tokens, work.prompt_tokens, prompts)]
        previous, seconds = seconds, plan.costs.time(step).seconds
        if seconds - previous <= 1e-6 * seconds:
            return seconds
    return math.inf


def model_and_plan(config: RunConfig, sizes: Mapping[str, int]) -> tuple[Model, Plan]:
    """The model of a config, and the plan of its weights; raises ValueError for one that no step is planned of."""
    if isinstance(body := body_of(config.model), DecoderConfig):
        raise ValueError(
            f"model is {body.architecture}, which transformers' code computes, and fzero plan traces fzero's own models"
        )
    model, tier = shared_model(config.model), Offload.parse(config.offload).params
    offload = "" if tier.memory.on_device else f"params={tier}"
    mesh, policy = shared_mesh(tuple(sizes.items()), 0), make_policy(config)
    plan = zero_plan(config.zero, model, mesh, policy=policy, offload=offload, frozen=frozen_leaves(config.model))
    expect_generates(model, plan)
    return model, plan


def expect_workload(workload: Workload, max_len: int) -> None:
    """Raise ValueError for lengths, a budget or a cache with which nothing is generated."""
    check_choice("cache", workload.cache, CACHES)
    for name in ("prompt_tokens", "new_tokens", "page_tokens"):
        if (value := getattr(workload, name)) < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if workload.step_tokens < workload.page_tokens:
        raise ValueError(
            f"step_tokens (--step-tokens) is {workload.step_tokens}, below a page of {workload.page_tokens}; give at "
            f"least {workload.page_tokens}"
        )
    if workload.tokens > max_len:
        raise ValueError(
            f"{workload.prompt_tokens:,} tokens of prompt and {workload.new_tokens:,} new ones do not fit "
            f"max_len={max_len:,}; ask for fewer"
        )


class FreeMemory:
    """What fits on a rank beside its weights."""

    def __init__(self, model: Model, plan: Plan, device: Device, workload: Workload, capacity: int) -> None:
        self.model, self.plan, self.device, self.workload = model, plan, device, workload
        self.capacity = capacity
        self.spec = page_spec(model, plan, 1, page_tokens=workload.page_tokens, dtype=CACHES[workload.cache])
        self.weights: dict[str, int] = dict.fromkeys(MEMORIES, 0)
        for leaf in plan.leaves.values():
            memory = str(leaf.params.memory)
            memory = "device" if device.kind == "cpu" and memory == "host" else memory
            self.weights[memory] += leaf.numel(leaf.params) * leaf.dtype.itemsize
        self.trace = functools.cache(functools.partial(trace_rows, model, plan, self.spec, device.target))

    def pages(self, step_bytes: int) -> int:
        """The pages that fit beside the weights, a step and the page of padding."""
        spare = self.capacity - self.weights["device"] - step_bytes - self.spec.page_bytes
        return max(0, spare) // self.spec.page_bytes if self.spec.page_bytes else MOST_ROWS

    def step_bytes(self, step: Sequence[Rows]) -> int:
        """The bytes of a step, and of the records of others, which a CPU keeps where weights are whole."""
        records = self.device.kind == "cpu" and self.plan.mesh.size == 1 and not self.weights["nvme"]
        decoding = (Rows(1, self.workload.context, RECORDED_TOKENS),)
        return self.trace(step).bytes + (self.trace(decoding).total_bytes if records else 0)

    def requests(self) -> tuple[int, int]:
        """(the requests whose pages fit, at most a step's rows; the bytes of their fullest step)."""
        per_request = pages_for(self.workload.tokens, self.workload.page_tokens)
        count, fitting, step_bytes = 0, self.workload.step_tokens, 0
        for _ in range(3):  # fewer requests need less for a step
            count = min(fitting, self.pages(step_bytes) // per_request)
            step_bytes = self.step_bytes(self.workload.fullest(max(1, count)))
            fitting = min(count, self.pages(step_bytes) // per_request)
            if fitting == count:
                break
        return fitting, step_bytes

    def longest(self) -> int:
        """The positions of the longest request that fits alone."""
        size, low = self.workload.page_tokens, 0
        high = min(self.model.config.max_len, self.pages(0) * size)
        length = high
        while length > 0:  # what a step needs may grow with the length
            step_bytes = self.step_bytes((Rows(min(length, self.workload.step_tokens), length),))
            low, high = (length, high) if length <= self.pages(step_bytes) * size else (low, length)
            if low == high or high - low <= max(size, high // 64):
                break
            length = (low + high) // 2
        return low


def best_batch(plan: GenerationPlan) -> int:
    """The smallest batch with NEAR_BEST of the most tokens/s."""
    rates = [plan.tokens_per_s(n) for n in range(1, plan.batch + 1)]
    return next((n for n, rate in enumerate(rates, 1) if rate >= NEAR_BEST * max(rates)), 0)


def hiding_batch(plan: GenerationPlan) -> int | None:
    """The smallest batch behind whose step the way of the weights is hidden; None where there is no way."""
    if not plan.costs.link_s:
        return None
    low, high = 0, MOST_ROWS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if plan.decode(middle).hides_link else (middle, high)
    return high

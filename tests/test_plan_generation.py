"""`fzero plan --ask generate` and `serve`: bytes are those of real tensors and of a real step, times the formulas'."""

import functools
import gc
import json
import math
from dataclasses import replace

import pytest
from law_cases import config_of

from fzero import generate, init_state, models, optim, zero_plan
from fzero.core import pytree
from fzero.generate import programs
from fzero.planner import devices, generation
from fzero.planner.generation import Workload, plan_generation, plan_serving, serve
from fzero.planner.generation_costs import Rows, mean_visible
from fzero.planner.generation_trace import trace_rows
from fzero.run.measure.live_bytes import LiveBytes
from fzero.sharding import one_process

SIZES = {"vocab_size": 509, "max_len": 160, "dropout": 0.0}
LLAMA = models.LlamaConfig(509, 160, 64, 2, 4, 2, 96)
CONFIGS = {
    "gpt2": models.GPT2Config(509, 160, 64, 2, 2, 96),
    "llama": LLAMA,
    "windows": replace(LLAMA, n_layers=3, pattern="window:16,full"),
    "experts": models.MoEConfig(509, 160, 64, 2, 4, 2, 96, n_experts=4, top_k=2),
    "gemma": config_of("gemma", **SIZES, tied=False),
    "deepseek": config_of("deepseek", **SIZES),
    **{kind: models.quantized(models.build(LLAMA), kind).config for kind in ("int8", "int4", "nf4")},
}
SMALL = Workload(prompt_tokens=48, new_tokens=16, step_tokens=40, page_tokens=8)
CPU = replace(
    devices.device("h100"), name="a processor", kind="cpu", efficiency={}, memory_bytes=1 << 30, reserved_bytes=1 << 20,
    margin=0.0, flops={"float32": 1e11, "bfloat16": 2e11}, bandwidth_bytes_s=1e10, op_s={"eager": 1e-5},
    nvme={"read": 1e9, "write": 1e9, "both": 1e9},
)  # fmt: skip


def asked(config, precision="fp32", **options):
    return plan_generation(
        config, gpu=options.pop("gpu", CPU), settings={"precision.policy": precision, **options.pop("settings", {})},
        workload=options.pop("workload", SMALL), **options,
    )  # fmt: skip


@functools.cache
def llama():
    """The plan of the small Llama on the processor."""
    return asked(LLAMA)


def real(config, precision):
    """(model, plan, weights) of a run in this precision."""
    model = models.build(config)
    plan = zero_plan(0, model, one_process(), policy=precision)
    return model, plan, init_state(model, optim.sgd(0.1), plan, seed=0).params


def nbytes(tree):
    return sum(x.nbytes for x in pytree.leaves(tree))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_of_weights_and_pages_are_those_of_tensors(name, precision):
    model, plan, params = real(CONFIGS[name], precision)
    memory = generation.FreeMemory(model, plan, CPU, SMALL, 10**9)
    assert memory.weights == {"device": nbytes(params), "host": 0, "nvme": 0}
    spec = replace(memory.spec, count=3)
    assert 4 * spec.page_bytes == spec.bytes == nbytes(spec.zeros().layers)
    count = memory.pages(10**6)
    left = 10**9 - 10**6 - nbytes(params) - replace(spec, count=count).bytes
    assert 0 <= left < spec.page_bytes


def measured_peak(model, plan, params, step_rows, page_tokens=8):
    """The most bytes of a real step beside its weights, pages and batch."""
    rows, first = [], 0
    for r in step_rows:
        for _ in range(r.count):
            used = -(-r.context // page_tokens)
            rows.append(([3] * r.tokens, r.context - r.tokens, range(first, first + used)))
            first += used
    pages = generate.page_spec(model, plan, first, page_tokens=page_tokens).zeros()
    batch = generate.StepBatch.of_rows(rows, [1] * len(rows), page_tokens=page_tokens)
    step = generate.make_step(model, plan)
    _, pages = step(params, pages, batch)
    with LiveBytes((params, pages.layers, batch)) as record:
        record.peak = start = record.live
        step(params, pages, batch)
    return record.peak - start


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(
            name, dtype, marks=[pytest.mark.slow] * ((name, dtype) not in (("llama", "fp32"), ("int4", "fp32")))
        )
        for name in CONFIGS
        for dtype in ("fp32", "bf16")
    ],
)
def test_the_peak_is_that_of_a_real_step(name, precision):
    model, plan, params = real(CONFIGS[name], precision)
    spec = generate.page_spec(model, plan, 1, page_tokens=8)
    for step in (SMALL.fullest(9), (Rows(1, 63, 9),)):
        traced, peak = trace_rows(model, plan, spec, CPU.target, step).bytes, measured_peak(model, plan, params, step)
        assert abs(traced - peak) <= 0.02 * peak, (step, traced, peak)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", pytest.param("windows", marks=pytest.mark.slow)])
def test_a_plan_counts_what_records_keep(name, precision, monkeypatch):
    monkeypatch.setattr(programs, "USES", 2)
    model, plan, params = real(CONFIGS[name], precision)
    pages, step = generate.page_spec(model, plan, 16, page_tokens=8).zeros(), generate.make_step(model, plan)
    rows = [([3], 6, [i]) for i in range(16)]
    with LiveBytes((params, pages.layers)) as live:
        start = live.live
        for count in [16] * 6 + [8] * 6 + [12] * 6:  # records of 16 and 8 tokens, then of 8 and 12
            batch = generate.StepBatch.of_rows(rows[:count], [1] * count, page_tokens=8)
            _, pages = step(params, pages, batch)
        del batch, _
        gc.collect()  # what tracing left
        kept = live.live - start
    spec = generate.page_spec(model, plan, 1, page_tokens=8)
    traced = trace_rows(model, plan, spec, CPU.target, (Rows(1, 7, 20),)).total_bytes
    assert abs(traced - kept) <= 0.02 * kept, (traced, kept)


def test_logits_of_the_wanted_rows_alone_are_in_the_peak():
    model, plan, _ = real(models.MLPConfig(20000, 160, 8, 1, 8), "fp32")
    spec = generate.page_spec(model, plan, 1, page_tokens=8)
    one, nine = (trace_rows(model, plan, spec, CPU.target, step).bytes for step in ([Rows(9, 9)], [Rows(1, 9, 9)]))
    assert 20000 * 4 <= one < 1.1 * 20000 * 4 and 9 * 20000 * 4 <= nine < 9.1 * 20000 * 4


@pytest.mark.parametrize("name", ["llama", pytest.param("deepseek", marks=pytest.mark.slow)])
def test_tp_splits_heads_and_not_latents(name):
    whole, half = (asked(CONFIGS[name], mesh={"tp": tp}) for tp in (1, 2))
    assert half.spec.page_bytes == whole.spec.page_bytes // (1 if name == "deepseek" else 2)
    c = CONFIGS[name]
    if name == "deepseek":
        assert whole.position_bytes == 4 * c.n_layers * (c.kv_rank + c.rope_dim)
    assert whole.weight_bytes["device"] / 2 <= half.weight_bytes["device"] < whole.weight_bytes["device"]


def test_a_step_reads_weights_and_pages_and_multiplies_once():
    answer, c = llama(), LLAMA
    step = answer.decode(3)
    table, norm = 4 * 509 * 64, 4 * 64
    weights = answer.weight_bytes["device"] - table  # the rows that are looked up alone
    assert step.memory_s == (weights + 3 * norm + 3 * (SMALL.context + 1) * answer.position_bytes) / 1e10
    products = sum(math.prod(shape) for name, shape in models.base.leaf_shapes(models.build(c)).items()) - 509 * 64
    attention = 2 * 2 * c.n_heads * c.key_dim * SMALL.context * c.n_layers
    assert step.compute_s == pytest.approx(3 * (2 * products + attention) / 1e11)
    assert step.seconds == step.memory_s + step.compute_s + step.host_s
    slow, fast = (step._replace(link_s=share * step.seconds) for share in (1.2, 1.05))
    assert not slow.hides_link and fast.hides_link and slow.seconds == slow.link_s > step.seconds
    assert answer.tokens_per_s(3) == 3 / step.seconds
    assert answer._replace(sizes={"dp": 2}).tokens_per_s(3) == pytest.approx(2 * 3 / step.seconds)


@pytest.mark.slow
def test_a_window_and_experts_lessen_what_is_read():
    windows, full = asked(CONFIGS["windows"]).costs, asked(replace(CONFIGS["windows"], pattern="full")).costs
    row = [Rows(1, 100)]
    assert full.page_bytes(row) - windows.page_bytes(row) == 2 * (100 - 16) * full.position_bytes[0]
    pattern = windows.patterns[0]
    assert mean_visible(pattern, 1, 100) == 16 and mean_visible(pattern, 100, 100) < 16
    costs = asked(CONFIGS["experts"]).costs
    one, many = (costs.read_bytes([Rows(1, 1, n)], 1) - costs.page_bytes([Rows(1, 1, n)]) for n in (1, 64))
    expert_bytes = costs.counts.experts[0]
    assert many - one == pytest.approx(expert_bytes * (1 - 0.5**64 - 0.5) + 63 * costs.counts.lookup)


RECORDED = (Rows(1, SMALL.context, generate.RECORDED_TOKENS),)


@pytest.mark.slow
def test_one_request_more_does_not_fit():
    real_llama = real(CONFIGS["llama"], "fp32")[:2]
    records = trace_rows(
        *real_llama, generate.page_spec(*real_llama, 1, page_tokens=8), CPU.target, RECORDED
    ).total_bytes
    gpu = replace(CPU, memory_bytes=(1 << 20) + 1_000_000 + records)
    answer = asked(CONFIGS["llama"], gpu=gpu)
    assert 1 < answer.batch < SMALL.step_tokens and answer.fits
    per_request = generate.pages_for(SMALL.tokens, SMALL.page_tokens)

    def needed(requests):
        memory = generation.FreeMemory(*real_llama, CPU, SMALL, answer.capacity_bytes)
        step_bytes = memory.step_bytes(SMALL.fullest(requests))
        assert step_bytes == records + memory.trace(SMALL.fullest(requests)).bytes
        return answer.weight_bytes["device"] + step_bytes + (requests * per_request + 1) * answer.spec.page_bytes

    assert needed(answer.batch) <= answer.capacity_bytes < needed(answer.batch + 1)
    none = asked(CONFIGS["llama"], gpu=replace(CPU, memory_bytes=(1 << 20) + 560_000 + records))
    assert not none.fits and none.batch == 0 and none.longest < answer.longest <= 160 and "NO REQUEST FITS" in str(none)


@pytest.mark.parametrize("memory", [pytest.param("host", marks=pytest.mark.slow), "nvme"])
def test_a_batch_hides_the_way_of_the_weights(memory):
    gpu = replace(devices.device("h100"), nvme={"read": 5e9, "write": 5e9, "both": 5e9})
    answer = asked(CONFIGS["llama"], "bf16", gpu=gpu, settings={"offload": f"params={memory}"})
    weights = 2 * answer.num_params
    assert answer.weight_bytes == {"device": 0, "host": 0, "nvme": 0} | {memory: weights}
    rate = 5e9 if memory == "nvme" else gpu.host["read"] * gpu.efficiency["host"]
    assert answer.costs.link_s == weights / rate
    assert answer.hiding is not None
    before, hidden = (answer.decode(answer.hiding - less) for less in (1, 0))
    assert max(hidden.memory_s, hidden.compute_s) >= answer.costs.link_s > max(before.memory_s, before.compute_s)
    assert answer.decode(1 << 16).host_s >= answer.decode(1).host_s > 0
    assert "a batch of" in str(answer) and answer.to_table()["hiding_batch"] == answer.hiding


@pytest.mark.slow
def test_weights_on_a_disk_leave_a_processor_its_buffers():
    resident, streamed = llama(), asked(CONFIGS["llama"], settings={"offload": "params=nvme"})
    assert streamed.weight_bytes["nvme"] == resident.weight_bytes["device"] and not streamed.weight_bytes["device"]
    assert streamed.step_bytes > resident.step_bytes
    assert streamed.costs.link_s == streamed.weight_bytes["nvme"] / 1e9


def test_serving_is_stable_up_to_a_rate():
    answer = llama()._replace(workload=Workload(48, 16, 400, 8))
    found = serve(answer, 1.0)
    for share, stable in ((0.5, True), (0.999, True), (1.001, False)):
        at_rate = serve(answer, share * found.largest_rate)
        assert at_rate.stable == stable == math.isfinite(at_rate.step_s)
        assert at_rate.utilisation == pytest.approx(share)
    half = serve(answer, 0.5 * found.largest_rate)
    assert half.rows == pytest.approx(half.rate * 16 * half.step_s)  # Little's law
    step = [Rows(1, answer.workload.context, half.rows), Rows(48, 48, half.rate * half.step_s)]
    assert half.step_s == pytest.approx(answer.costs.time(step).seconds, rel=1e-4)
    assert half.rows + half.prompt_tokens <= 400 and half.pages < answer.spec.count
    twice = serve(answer._replace(sizes={"dp": 2}), 1.0)
    assert twice.largest_rate == pytest.approx(2 * found.largest_rate)
    assert plan_serving(CONFIGS["llama"], 1.0, gpu=CPU, workload=SMALL).stable


def test_the_fullest_step_has_the_budget():
    for requests in (1, 2, 39, 40):
        rows = SMALL.fullest(requests)
        assert sum(r.tokens * r.count for r in rows) == SMALL.step_tokens and sum(r.count for r in rows) == requests
    assert [r.tokens for r in SMALL.chunks()] == [40, 8] and [r.context for r in SMALL.chunks()] == [40, 48]


def test_a_command_answers_in_words_and_as_json(fz):
    flags = [
        "--model",
        "llama-tiny",
        "--set",
        "model.n_layers=1",
        "--precision",
        "bf16",
        "--step-tokens",
        "64",
        "--new-tokens",
        "32",
    ]
    code, out, err = fz("plan", "--ask", "generate", *flags)
    assert code == 0 and "requests fit" in out and "a position 512 B" in out and "the best" in out, err
    code, out, err = fz("plan", "--ask", "serve", "--rate", "0.01", *flags, "--json")
    facts = json.loads(out)
    assert code == 0 and facts["serve"]["stable"] and facts["page_bytes"] == 16 * 512, err
    work = {"prompt_tokens": 512, "new_tokens": 32, "step_tokens": 64, "page_tokens": 16, "cache": "auto"}
    assert facts["workload"] == work
    assert [row["batch"] for row in facts["decode"]][:3] == [1, 2, 4] and facts["decode"][0]["fits"]
    code, quantised, err = fz("plan", "--ask", "generate", *flags, "--quantize", "int8", "--json")
    assert json.loads(quantised)["weight_bytes"]["device"] < facts["weight_bytes"]["device"], err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt-tokens", "5"], "--prompt-tokens is for --ask generate"),
        (["--ask", "serve"], "--ask serve needs --rate"),
        (["--ask", "generate", "--rate", "3"], "--rate is for --ask serve"),
        (["--ask", "generate", "--step-tokens", "4"], "step_tokens (--step-tokens) is 4, below a page of 16"),
        (["--ask", "generate", "--prompt-tokens", "1000"], "1,000 tokens of prompt and 128 new ones do not fit"),
        (["--ask", "generate", "--mesh", "pp=2"], "pp=2: generation splits no layers over ranks"),
        (["--ask", "generate", "--vary", "zero=0,3"], "--ask generate answers one question; leave out --vary"),
        (["--ask", "generate", "--classes", "3"], "the model has a head of scores"),
        (["--ask", "generate", "--quantize", "int7"], "kind is 'int7' (did you mean int8?)"),
        (["--ask", "generate", "--prompt-tokens", "0"], "--prompt-tokens is 0; it must be at least 1"),
        (["--ask", "serve", "--rate", "0"], "--rate is 0.0; it must be above 0"),
    ],
)
def test_bad_input_is_one_line(fz, flags, message):
    code, _, err = fz("plan", "--model", "llama-tiny", *flags)
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1


def test_models_of_other_code_and_devices_without_rates_are_said():
    decoder = models.DecoderConfig("PhiForCausalLM", "{}", 100, 64, 32, 2, 64, 4, 8)
    with pytest.raises(ValueError, match="PhiForCausalLM, which transformers' code computes"):
        asked(decoder)
    unknown = replace(CPU, flops={}, bandwidth_bytes_s=1.0, measured=False)
    answer = asked(CONFIGS["llama"], gpu=unknown)
    assert not answer.timed and answer.to_table()["decode"] == [] and "tokens/s" not in str(answer)
    with pytest.raises(ValueError, match="serving needs the rates of a processor; run fzero bench"):
        serve(answer, 1.0)

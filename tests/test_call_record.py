"""A record of a function's calls computes what the function does, for other tensors of the same shapes."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from close import assert_close, assert_same

import fzero
from fzero import generate, models
from fzero.core import have_compiler, pytree
from fzero.core.call_record import record_calls
from fzero.generate import programs, step_records
from fzero.kernels.linear import linear_product
from fzero.kernels.moe import grouped_product
from fzero.kernels.norm import rms_norm_forward
from fzero.kernels.recorded_loops import RECORDED_LOOPS

TABLE = torch.zeros(3, 4)
WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(9))


def work(x, index):
    """Views, memory that is zeroed and added to, results of two tensors, writes in place, and C++ loops."""
    sums = torch.zeros(3, 4)
    sums.index_add_(0, index.expand(2), x.view(1, 4).expand(2, 4))
    TABLE.index_copy_(0, index, x.view(1, 4))
    values, order = torch.sort(x, descending=True)
    empty = torch.empty(2, 4)
    empty[0] = values
    empty[1:].fill_(2.0)
    normed, inverse = rms_norm_forward(linear_product(x.view(1, 4), WEIGHT), torch.ones(4), 1e-5)
    return [sums, order, empty.T.contiguous()[::2], normed * inverse, TABLE[index], x, x.view(2, 2).unbind(0)[1]]


def test_a_record_computes_what_its_function_does():
    def tensors(seed):
        return torch.randn(4, generator=torch.Generator().manual_seed(seed)), torch.tensor([seed % 3])

    record, outs, inputs = record_calls(work, tensors(0)), [], [tensors(seed) for seed in (1, 2, 4)]
    for x, index in inputs:
        TABLE.zero_()
        outs.append((record(x, index), TABLE.clone()))
    for (x, index), out in zip(inputs, outs):  # none of which a later call wrote into
        TABLE.zero_()
        assert_same(out, (work(x, index), TABLE))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x[: int(x[0])]],
        lambda x: [x[x > 0.0]],
        lambda x: [x.nonzero()],
        lambda x: [torch.rand(3) + x[:3]],
    ],
)
def test_what_needs_values_or_draws_has_no_record(function):
    assert record_calls(function, [torch.ones(4)]) is None
    assert record_calls(lambda x: [x + 1.0], [torch.ones(4)]) is not None  # and leaves nothing behind


def test_an_operator_that_reads_values_is_called_again():
    x, w = torch.randn(6, 4), torch.randn(3, 4, 2)
    record = record_calls(lambda ends: [grouped_product(x, w, ends)], [torch.tensor([2, 4, 6], dtype=torch.int32)])
    ends = torch.tensor([1, 1, 6], dtype=torch.int32)
    assert_same(record(ends), [grouped_product(x, w, ends)])


def add_and_write(x, index):
    """Additions and writes of rows, of which loops serve those of one shape and dtype that lie in order."""
    y = x.to(torch.bfloat16)
    TABLE.index_copy_(0, index, x)
    TABLE[:, :2].index_copy_(0, index, -x[:, :2])
    served = [x + x, y + y.flip(0)]
    return [*served, x + y, x + 1.0, x.T + x.T, x[:1] + x, x.add(x, alpha=2.0), x.double() + x.double()]


@pytest.mark.skipif(not have_compiler(), reason="there is no C++ compiler")
def test_loops_have_the_bits_of_operators():
    def tensors(seed):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        return x, torch.tensor([seed % 3, (seed + 1) % 3])

    record = record_calls(add_and_write, tensors(0), RECORDED_LOOPS)
    plain = record_calls(add_and_write, tensors(0))
    names = [getattr(function, "__name__", "") for function, arguments in record.calls if not arguments]
    assert names.count("call") == 1 and len(names) == 3  # the write, and two additions
    for seed in (1, 2):
        x, index = tensors(seed)
        x[0, 0] = torch.inf * (-1) ** seed
        results = []
        for function in (record, plain, add_and_write):
            TABLE.zero_()
            results.append(([*function(x, index)], TABLE.clone()))
        assert_same(results[0], results[1])
        assert_same(results[0], results[2])
    with pytest.raises(IndexError, match="row 3 of a tensor of 3 rows"):
        record(tensors(0)[0], torch.tensor([0, 3]))


CONFIGS = {
    "llama": models.LlamaConfig(61, 64, 32, 2, 4, 2, 48),
    "gpt2": models.GPT2Config(61, 64, 32, 2, 4),
    "deepseek": models.DeepSeekConfig(61, 64, 32, n_layers=2, n_heads=4, n_dense=1, n_experts=16, d_expert=16),
}


@pytest.mark.parametrize(
    ("dtype", "kernels"), [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "canonical")]
)
@pytest.mark.parametrize("family", CONFIGS)
def test_recorded_steps_are_the_steps(family, dtype, kernels, monkeypatch):
    model = models.build(CONFIGS[family])
    params = models.init_params(model, fzero.random.key(0), dtype)
    # of which the second comes while the first decodes, so that shapes change and come again
    prompts = [generate.Prompt((5, 9, 3 + i), generate.Sampling(max_tokens=20 - 9 * i), number=i) for i in range(2)]
    calls = []
    monkeypatch.setattr(programs, "USES", 2)

    def texts():
        options = generate.GenerateOptions(kernels=kernels, page_tokens=4, tokens=3)
        out = generate.completions(model, params, prompts, options=options)
        return {c.number: (c.ids, c.log_probs) for c in out}

    monkeypatch.setattr(step_records, "RECORDED_TOKENS", 0)
    expected = texts()  # also makes the programs of these shapes
    monkeypatch.setattr(step_records, "RECORDED_TOKENS", 32)
    run = step_records.CallRecord.__call__
    monkeypatch.setattr(step_records.CallRecord, "__call__", lambda *a: (calls.append(1), run(*a))[1])
    for _ in range(2):
        assert texts() == expected
    reads_rows = (family, kernels) == ("deepseek", "canonical")  # latents of each row: no program, no record
    assert (len(calls) > 10) != reads_rows


def test_records_follow_parameters_and_pages_and_leave_results_alone(monkeypatch):
    monkeypatch.setattr(programs, "USES", 2)
    model = models.build(CONFIGS["llama"])
    plan = fzero.zero_plan(0, model, fzero.one_process())
    trees = [models.init_params(model, fzero.random.key(seed)) for seed in (0, 1)]
    spec = generate.page_spec(model, plan, count=4, page_tokens=8)

    def logits_of(order, fresh):
        steps, pages = [generate.make_step(model, plan)] * len(order), [spec.zeros(), spec.zeros()]
        out, kept = [], []
        for i, (tree, side) in enumerate(order):
            step = generate.make_step(model, plan) if fresh else steps[i]
            batch = generate.StepBatch.of_rows([([5 + i], i % 8, [side])], [1], page_tokens=8)
            logits, pages[side] = step(trees[tree], pages[side], batch)
            out.append(logits)
            kept.append(logits.clone())
        assert_same(out, kept)  # a later step wrote into none
        return out

    order = [(0, 0)] * 9 + [(1, 0)] * 9 + [(1, 1)] * 9 + [(0, 1)] * 2
    assert_same(logits_of(order, False), logits_of(order, True))


def put_data(tree, new):
    pytree.map(lambda x, y: setattr(x, "data", y.clone()), tree, new)


def put_leaves(tree, new):
    for name, value in pytree.map(torch.clone, new).items():
        tree[name] = value


@pytest.mark.parametrize("put", [put_data, put_leaves, lambda tree, new: pytree.map(torch.Tensor.copy_, tree, new)])
def test_records_see_weights_in_other_memory(put, monkeypatch):
    monkeypatch.setattr(programs, "USES", 2)
    model = models.build(CONFIGS["llama"])
    plan = fzero.zero_plan(0, model, fzero.one_process())
    weights = [models.init_params(model, fzero.random.key(seed)) for seed in (0, 1)]
    params, step = pytree.map(torch.clone, weights[0]), generate.make_step(model, plan)
    pages = generate.page_spec(model, plan, count=1, page_tokens=8).zeros()
    for token, current in enumerate([0] * 6 + [1] * 6 + [0] * 2):
        if token in (6, 12):
            put(params, weights[current])
        batch = generate.StepBatch.of_rows([([token], 0, [0])], [1], page_tokens=8)
        logits, pages = step(params, pages, batch)
        expected = models.logits(model, weights[current], {"tokens": torch.tensor([[token]])})
        assert_close(logits[None], expected, atol=1e-5)


def test_threads_share_a_step(monkeypatch):
    monkeypatch.setattr(programs, "USES", 2)
    programs.programs_of.cache_clear()  # so that the threads make the same graphs
    model = models.build(CONFIGS["llama"])
    plan = fzero.zero_plan(0, model, fzero.one_process())
    params, step = models.init_params(model, fzero.random.key(0)), generate.make_step(model, plan)

    def logits_of(seed):
        pages, out = generate.page_spec(model, plan, count=4, page_tokens=8).zeros(), []
        for i in range(32):
            batch = generate.StepBatch.of_rows([([(seed * i + 3) % 61], i, [0, 1, 2, 3])], [1], page_tokens=8)
            logits, pages = step(params, pages, batch)
            out.append(logits)
        return out

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(logits_of, (5, 7, 11)))
    finally:
        sys.setswitchinterval(interval)
    for seed, out in zip((5, 7, 11), results):
        assert_same(out, logits_of(seed))

"""A step over pages computes what a full forward pass does, however rows, chunks and pages are cut."""

import random as python_random

import pytest
import torch
from close import assert_close
from law_cases import config_of

from fzero import generate, models, one_process, zero_plan
from fzero.core import prng, pytree
from fzero.core.form_observer import observe
from fzero.generate.programs import USES

SIZES = {"vocab_size": 61, "max_len": 40, "dropout": 0.0}
PATTERNS = ("window:4", "local:4", "strided:3", "fixed:4:1", "bigbird:2:1:1:1:3", "window:4 full")
CONFIGS = {
    "gpt2": models.GPT2Config(61, 40, 16, 2, 2, 32, init_std=0.3),
    "gpt2 window:4": models.GPT2Config(61, 40, 16, 2, 2, 32, init_std=0.3, pattern="window:4"),
    "mlp": models.MLPConfig(61, 40, 16, 2, 24),
    "llama": models.LlamaConfig(61, 40, 16, 2, 4, 2, 24, init_std=0.3),
    "llama layer_tokens": models.LlamaConfig(61, 40, 16, 2, 4, 2, 24, init_std=0.3, layer_tokens=8, mlp_tokens=4),
    "moe": models.MoEConfig(61, 40, 16, 2, 4, 2, 24, init_std=0.3, n_experts=4, top_k=2),
    "gemma": config_of("gemma", **SIZES, tied=False),
    "deepseek": config_of("deepseek", **SIZES, rope_scaling=models.RopeScaling(4.0, 1.0, 8.0, 16, "yarn")),
    **{
        f"llama {pattern}": models.LlamaConfig(61, 40, 16, 2, 4, 2, 24, init_std=0.3, pattern=pattern)
        for pattern in PATTERNS[:5]
    },
}
LENGTHS = (33, 5, 18, 1)


def trees(config):
    model = models.build(config)
    return model, zero_plan(0, model, one_process()), models.init_params(model, prng.key(1), torch.float64)


def texts(lengths=LENGTHS):
    return [prng.permutation(prng.key(3 + i), 61, torch.arange(n)).tolist() for i, n in enumerate(lengths)]


def whole(model, params, text):
    """The logits of a full forward pass, without pages."""
    return models.logits(model, params, {"tokens": torch.tensor([text])}, models.Ctx(dtype=torch.float64))[0]


def chunks(lengths, seed):
    """Steps of a random schedule: [(row, first, length)] each."""
    draw, done, steps = python_random.Random(seed), [0] * len(lengths), []
    while any(a < b for a, b in zip(done, lengths)):
        step = []
        for row in draw.sample(range(len(lengths)), len(lengths)):
            if done[row] < lengths[row] and draw.random() < 0.7:
                size = min(lengths[row] - done[row], draw.choice([1, 1, 2, 3, 7, 16]))
                step.append((row, done[row], size))
                done[row] += size
        steps.append(step)
    return steps


def by_pages(model, plan, params, rows, seed, page_tokens=4, **options):
    """The logits of texts from steps of a random schedule, in pages in random order."""
    spec = generate.page_spec(model, plan, 40, page_tokens=page_tokens, dtype=torch.float64)
    step, pages = generate.make_step(model, plan, dtype=torch.float64, **options), spec.zeros()
    free = python_random.Random(seed).sample(range(40), 40)
    tables = [[free.pop() for _ in range(-(-len(row) // page_tokens))] for row in rows]
    out = [[] for _ in rows]
    for chunk in chunks([len(row) for row in rows], seed):
        batch = [
            (rows[i][first : first + n], first, tables[i][: -(-(first + n) // page_tokens)]) for i, first, n in chunk
        ]
        wanted = [n for *_, n in chunk]
        logits, pages = step(params, pages, generate.StepBatch.of_rows(batch, wanted, page_tokens=page_tokens))
        for (i, *_), part in zip(chunk, logits.split(wanted)):
            out[i].append(part)
    return [torch.cat(parts) for parts in out]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_a_step_are_those_of_a_full_pass(name, seed):
    model, plan, params = trees(CONFIGS[name])
    rows = texts()
    for row, logits in zip(rows, by_pages(model, plan, params, rows, seed)):
        assert_close(logits, whole(model, params, row), rtol=1e-9, atol=1e-11)


def test_only_the_wanted_logits_are_computed():
    model, plan, params = trees(CONFIGS["llama"])
    spec = generate.page_spec(model, plan, 9, page_tokens=4, dtype=torch.float64)
    step, (row,) = generate.make_step(model, plan, dtype=torch.float64), texts((33,))
    batch = generate.StepBatch.of_rows([(row, 0, range(9))], [1], page_tokens=4)
    logits, _ = step(params, spec.zeros(), batch)
    assert logits.shape == (1, 61)
    assert_close(logits[0], whole(model, params, row)[-1], rtol=1e-9, atol=1e-11)


def test_pages_that_a_step_was_given_are_refused():
    model, plan, params = trees(CONFIGS["llama"])
    pages = generate.page_spec(model, plan, 2, page_tokens=4, dtype=torch.float64).zeros()
    step = generate.make_step(model, plan, dtype=torch.float64)
    batch = generate.StepBatch.of_rows([([1, 2], 0, [1])], [1], page_tokens=4)
    _, new = step(params, pages, batch)
    with pytest.raises(ValueError, match="these pages were given to a step"):
        step(params, pages, batch)
    assert new.layers[0][0][1, :2].abs().sum() > 0 and new.layers[0][0][0].abs().sum() == 0


def test_other_pages_after_many_steps_have_graphs_of_their_own():
    model, plan, params = trees(CONFIGS["llama"])
    step, text = generate.make_step(model, plan, dtype=torch.float64), [7, 8, 9]
    for count, size in ((4, 8), (9, 8), (8, 4)):
        pages = generate.page_spec(model, plan, count, page_tokens=size, dtype=torch.float64).zeros()
        batch = generate.StepBatch.of_rows([(text, 0, [3])], [3], page_tokens=size)
        for _ in range(USES + 1):
            logits, pages = step(params, pages, batch)
        assert_close(logits, whole(model, params, text), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_steps_take_loops_and_stay_as_close_as_a_full_pass(dtype):
    model, plan, params = trees(CONFIGS["llama"])
    text, exact = texts((33,))[0], whole(model, params, texts((33,))[0])
    params = pytree.map(lambda x: x.to(dtype), params)
    plain = models.logits(model, params, {"tokens": torch.tensor([text])}, models.Ctx(dtype=dtype))[0]
    step, pages = (
        generate.make_step(model, plan, dtype=dtype),
        generate.page_spec(model, plan, 9, page_tokens=4, dtype=dtype).zeros(),
    )
    with observe() as forms:
        for size in (33, *[1] * (USES + 2)):  # the last ones as graphs
            first = 33 - size
            batch = generate.StepBatch.of_rows([(text[first:], first, range(9))], [size], page_tokens=4)
            logits, pages = step(params, pages, batch)
            assert (logits - exact[first:]).norm() <= 2 * (plain - exact)[first:].norm() + 1e-6 * exact.norm()
    for name in ("rope_qk", "rms_norm", "add_rms_norm", "swiglu"):
        assert forms[name] == {"cpp"}, name


def test_the_bytes_of_pages_are_those_of_their_tensors():
    for config in CONFIGS.values():
        model, plan, _ = trees(config)
        spec = generate.page_spec(model, plan, 3, dtype=torch.bfloat16)
        assert sum(x.nbytes for layer in spec.zeros().layers for x in layer) == spec.bytes
    deepseek = models.build(CONFIGS["deepseek"])
    c = deepseek.config  # a position's latent and turned key, in place of all heads' keys and values
    spec = generate.page_spec(deepseek, zero_plan(0, deepseek, one_process()), 1, page_tokens=1, dtype=torch.bfloat16)
    assert spec.page_bytes == 2 * c.n_layers * (c.kv_rank + c.rope_dim)

"""kernels=canonical on a GPU: products and attention whose rows have the same bits alone, in a batch, in a chunk and in
pages; and whole models on the pretend GPU."""

import dataclasses

import kernel_laws as laws
import pytest
import torch
from close import assert_same
from law_cases import config_of
from pretend_gpu import pretend
from pretend_triton import interpreted
from test_paged_attention_triton import PATTERNS, ROWS, call, make_tiles_small, options_of

from fzero import generate, models, one_process, random, zero_plan
from fzero.core import pytree
from fzero.kernels import Kernels, attention_canonical, linear_triton, rowwise
from fzero.kernels import attention as attn
from fzero.kernels.attention import attention
from fzero.kernels.linear import linear, logits
from fzero.kernels.paged_attention_triton import attend_in_order

later = pytest.mark.slow
BF16, F32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
SMALL = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16}


def product(x, w, **blocks):
    """The product by tiles of SMALL with other `blocks`."""
    with pytest.MonkeyPatch.context() as patch:
        for wide in linear_triton.CONFIGS:
            patch.setitem(linear_triton.CONFIGS, wide, [SMALL | blocks])
        return linear_triton.row_product(x, w, x.dtype)


@DTYPES
def test_a_row_of_a_product_depends_on_itself_alone(dtype):
    x, w = laws.draw((37, 100), (100, 45), dtype=dtype)
    whole = product(x, w)
    want = x.double() @ w.double()
    laws.at_most_twice("product", whole, x @ w, want)
    for first, end in ((0, 1), (36, 37), (3, 20), (16, 33)):
        assert_same(product(x[first:end], w), whole[first:end])
    assert_same(product(x, w.T.contiguous().T), whole)
    assert_same(product(x.repeat(1, 2)[:, :100], w), whole)
    wide = linear_triton.row_product(x, w, F32)
    assert wide.dtype == F32
    laws.at_most_twice("product", wide, x.float() @ w.float(), want)
    if dtype == F32:  # planted: tiles of another size along K are another order
        assert not torch.equal(product(x, w, BLOCK_K=64), whole)


def test_products_that_are_empty():
    x, w = laws.draw((0, 8), (8, 5), dtype=F32)
    assert_same(linear_triton.row_product(x, w, F32), x @ w)
    assert_same(linear_triton.row_product(w.T[:, :0], w[:0], F32), torch.zeros(5, 5, device=laws.DEVICE))


@pytest.mark.parametrize("name", ["full", *(pytest.param(p, marks=later) for p in ("window", "fixed", "bigbird"))])
def test_a_query_depends_on_its_keys_alone(name, monkeypatch):
    """Rows in a batch are those alone, in chunks of one and more, and in a sequence without pages."""
    make_tiles_small(monkeypatch)
    *tensors, table, starts, positions = call(ROWS, dtype=BF16, behind=0)
    how = options_of(4)["sinks"], PATTERNS[name].numbers, 0.3, 5.0
    whole, lse = attend_in_order(tensors, (table, starts, positions), *how)
    q, k, v = tensors
    for row, first in ((5, 0), (5, 3), (2, 1), (4, 18)):
        start, stop = int(starts[row]) + first, int(starts[row + 1])
        one = table[row : row + 1], torch.tensor([0, stop - start], dtype=torch.int32), positions[start:stop]
        out, level = attend_in_order((q[start:stop], k, v), [x.to(q.device) for x in one], *how)
        assert_same([out, level], [whole[start:stop], lse[start:stop]])
    start, stop, end = *starts[5:7].tolist(), int(positions[int(starts[6]) - 1]) + 1
    k, v = (x[table[5].long()].flatten(0, 1)[None, :end] for x in (k, v))
    out, level = attention_canonical.on_pages(q[None, start:stop], k, v, *how)
    assert_same([out[0], level[0].T], [whole[start:stop], lse[start:stop]])
    options = {"pattern": PATTERNS[name], "scale": 0.3, "cap": 5.0}
    want = attn.reference(q[None, start:stop].double(), k.double(), v.double(), sinks=how[0].double(), **options)
    plain = attn.reference(q[None, start:stop], k, v, sinks=how[0], **options)
    laws.at_most_twice("attention", out, plain, want)


# ---- models on the pretend GPU ---------------------------------------------------------------------------------------

SIZES = {"vocab_size": 61, "max_len": 40, "dropout": 0.0}


def in_float64(op):
    return [dataclasses.replace(form, run=lambda x: op.reference(x.double()).to(x.dtype)) for form in op.forms]


@later
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma", "gpt-oss", "deepseek"])
def test_a_step_of_generation_has_the_bits_of_the_trainer_s_forward_pass(kind, monkeypatch):
    monkeypatch.setattr("fzero.generate.programs.USES", 99)  # graphs, which nobody makes of pretend tensors
    for op in (rowwise.gelu, rowwise.sigmoid):  # torch's, which on the CPU below depend on a number's place
        monkeypatch.setattr(op, "forms", in_float64(op))
    canonical = Kernels.parse("canonical")
    with pretend(), interpreted(), torch.no_grad():
        model = models.build(config_of(kind, **SIZES))
        plan = zero_plan(0, model, one_process())
        params = pytree.map(lambda x: x.to("cuda"), models.init_params(model, random.key(1)))
        texts = torch.randint(61, (2, 21), generator=torch.Generator().manual_seed(0))
        whole = models.logits(model, params, {"tokens": texts.to("cuda")}, models.Ctx(kernels=canonical, dtype=F32))
        pages = generate.page_spec(model, plan, 8, page_tokens=4, dtype=F32).zeros("cuda")
        step, table = generate.make_step(model, plan, kernels="canonical", dtype=F32), [5, 0, 3, 1, 7, 2]
        for first, n in ((0, 13), (13, 1), (14, 7)):
            row = texts[1, first : first + n].tolist(), first, table[: -(-(first + n) // 4)]
            batch = generate.StepBatch.of_rows([row], [n], page_tokens=4, device="cuda")
            found, pages = step(params, pages, batch)
            assert_same(found.to("cpu"), whole[1, first : first + n].to("cpu"))


def test_what_a_gpu_has_no_canonical_form_for_is_named():
    with pretend(), interpreted():
        q = torch.zeros(1, 3, 2, 8, device="cuda")
        with pytest.raises(ValueError, match="there are documents, which it takes on a CPU alone"):
            attention(q, q, q, documents=torch.zeros(1, 3, dtype=torch.int64, device="cuda"), impl="canonical")
        with pytest.raises(ValueError, match=r"the dtypes are torch\.float16 and torch\.float16"):
            linear(q[0, 0].half(), q[0, 0].T.half(), impl="canonical")
        x, w = torch.randn(3, 8, device="cuda").requires_grad_(), torch.randn(5, 8, device="cuda")
        logits(x, w, 2.0, impl="canonical").sum().backward()
        with pytest.raises(ValueError, match="the dtypes are"):
            logits(x.double(), w.double(), impl="canonical")
        assert x.grad is not None and x.grad.shape == x.shape

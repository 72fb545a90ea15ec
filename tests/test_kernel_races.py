"""Programs of Triton's kernels that would race on a GPU, or leave their tensors: none of ours does, in any order, and
those that are made to are found."""

import contextlib
import functools

import kernel_laws as laws
import pytest
import test_optim_kernels as leaves
import torch
from close import assert_close, assert_same
from kernel_races import watched_programs
from test_attention_at import PATTERNS, of_triton
from test_attention_at import small_tiles as small_tiles
from test_cross_entropy_kernels import TERMS, of_logits
from test_moe_float8 import passes as pass_through_float8
from test_moe_kernels import rows_of
from test_paged_attention_triton import call as call_on_pages
from test_paged_attention_triton import make_tiles_small
from triton.runtime import interpreter

from fzero.core import prng
from fzero.kernels import (
    KINDS,
    aot,
    attention,
    block_mask,
    cross_entropy_triton,
    float8,
    float8_gather,
    glu,
    grad_norm,
    moe,
    moe_permute,
    moe_routing,
    newton_schulz,
    norm,
    paged_attention,
    quantize,
    rope,
    triton,
    tuning,
)
from fzero.kernels.custom_operator import tl
from fzero.kernels.dropout import dropout_add
from fzero.kernels.linear_triton import row_product

pytestmark = pytest.mark.skipif(not laws.INTERPRETED, reason="programs are watched in the interpreter")
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture
def small_blocks(small_tiles, monkeypatch):
    """Blocks of matrices of at most 32, so that small ones have several programs along each dim."""

    def config(kernel, shape, default, device):
        sides = {name for name in default if name.startswith("BLOCK_") or (kernel, name) == ("_symmetric", "BLOCK")}
        return default | {name: min(default[name], 32) for name in sides}

    monkeypatch.setattr(tuning, "config", config)
    make_tiles_small(monkeypatch)


# ---- every kernel of ours --------------------------------------------------------------------------------------------


def passes(f, *shapes, dtype=F32):
    """A call: forward and backward pass of `f(impl, *tensors)` for random tensors."""
    return lambda: laws.both_passes(functools.partial(f, "triton"), laws.draw(*shapes, dtype=dtype))


def attend(pattern, t=45, heads=2, documents=True, dtype=F32):
    docs = torch.arange(t)[None] // 25 if documents else None
    f = lambda impl, *x: attention.attention(*x, impl=impl, pattern=pattern, documents=docs)  # noqa: E731
    return passes(f, (1, t, heads, 16), (1, t, 1, 16), (1, t, 1, 16), dtype=dtype)


def attend_by_blocks(**options):
    mask = block_mask.bigbird_blocks(80, 16, heads=4, **options)
    f = lambda impl, *x: attention.attention(*x, mask=mask, impl=impl)  # noqa: E731
    return passes(f, (2, 80, 4, 16), (2, 80, 2, 16), (2, 80, 2, 16))


def attend_at(pattern, t, s, **options):
    f, _ = of_triton(1, t, s, pattern=pattern, **options)
    passes(f, (1, t, 1, 16), (1, s, 1, 16), (1, s, 1, 16))()


def attend_pages(pattern, **sizes):
    sinks = torch.linspace(-2.0, 2.0, 4, device=laws.DEVICE)
    paged_attention.paged_attention(*call_on_pages(**sizes), impl="triton", pattern=pattern, sinks=sinks)


def cross_entropy(columns, terms):
    passes(of_logits("triton", 5, columns, **terms), (5, columns))()


def rows_of_experts():
    order, place, _ = rows_of(5, 2, 4)
    passes(lambda impl, x: moe_permute.permute(x, order, place, impl=impl), (5, 1100))()
    passes(lambda impl, y, w: moe_permute.unpermute(y, w, order, place, impl=impl), (10, 1100), (5, 2))()


def grouped(d, f):
    ends = torch.tensor([0, 35, 35, 40], dtype=torch.int32)
    passes(lambda impl, x, w: moe.grouped_mm(x, w, ends, impl=impl), (45, d), (4, d, f))()


def grouped_float8(d, f):
    x, w, g = laws.draw((45, d), (4, d, f), (45, f), dtype=F32)
    pass_through_float8("triton", x, w, g, torch.tensor([0, 35, 35, 40], dtype=torch.int32))


def route():
    passes(lambda impl, x: moe_routing.route(x, 3, impl=impl)[1:], (130, 5))()
    moe_routing.group(torch.arange(140).reshape(70, 2) * 7 % 5, 5, impl="triton")


def normed(name, dtype=F32):
    op, shape = getattr(norm, name), (150, 33)
    shapes = [shape] * (1 + ("add" in name)) + [shape[-1:]] * (1 + ("layer" in name))
    return passes(lambda impl, *x: op(*x, 1e-5, impl=impl), *shapes, dtype=dtype)


def magnitudes():
    x, r, g, w = laws.draw((150, 48), (150, 48), (150, 48), (48,), dtype=BF16)
    stats = torch.ops.fzero.add_norm_forward_largest(x, r, w, None, 1e-5)[2]
    torch.ops.fzero.norm_backward_largest(g, None, x, w, stats)
    torch.ops.fzero.glu_forward_largest(x, r, 0)
    torch.ops.fzero.glu_backward_largest(x, r, g, 0)


def rotated(impl, x):
    t, k = x.shape[1], x.shape[3]
    return rope.rope(x, torch.arange(t) * 61 % 97, rope.rope_frequencies(k, 1e4, None, x.device), impl=impl)


def scaled():
    cross_entropy_triton.scale_by_kernel_(laws.draw((3, 5000), dtype=F32)[0], torch.tensor(0.3))


def gathered():
    (x,) = laws.draw((3, 3000), dtype=BF16)
    most = x.abs().max().float()
    float8_gather.widen_weight(float8_gather.narrow_weight(x, most, impl="triton"), most, impl="triton")


def to_float8(scaling):
    (x,) = laws.draw((70, 40), dtype=BF16)
    rows, columns = (torch.linalg.vector_norm(x, torch.inf, dim=dim) for dim in (1, 0))
    by_row, by_column = (rows, columns) if float8.recipe_of(scaling).rowwise else (x.abs().max(),) * 2
    float8.float8_numbers(x, by_row, scaling, False)
    float8.float8_numbers(x.t(), by_column, scaling, True)
    float8.float8_both(x, by_row, by_column, scaling, False)


def updated(name, state):
    shapes = leaves.MATRICES if state == "8 bits" else leaves.SHAPES
    leaves.after(name, leaves.draw(name, shapes, **leaves.STATES[state]), leaves.rates(name), "triton")


def coded(kind, shape=(3, 1000), **rounding):
    (x,) = laws.draw(shape, dtype=F32)
    q = quantize.quantize(x, kind, 64, impl="triton", **rounding)
    quantize.dequantize(q, kind, 64, size=shape[-1], impl="triton")
    stacked = [torch.stack((t.view(torch.uint8), t.view(torch.uint8))).view(t.dtype) for t in q]
    quantize.dequantize_sum_requantize(*stacked, kind, 64, size=shape[-1], impl="triton", **rounding)


MASKED = ("_masked_forward", "_masked_dq", "_masked_dkv")
PAGED = ("_paged_attention", "_join_splits")
FLASH = ("_flash_forward", "_flash_dq", "_flash_dkv")
CODES, NORMS = ("_quantize", "_dequantize", "_sum_requantize"), ("_norm_forward", "_norm_backward")
# The kernels of a case, each of which must have several programs along every axis, and a call.
CASES = {
    "attention": ((*FLASH, "_document_bounds"), attend(PATTERNS[1], 33, 1)),
    "attention at": ((*FLASH, "_tile_spans"), lambda: attend_at(PATTERNS[0], 33, 33)),
    "attention by blocks": (MASKED, lambda: attend_by_blocks()()),
    "attention over pages": (PAGED, lambda: attend_pages(PATTERNS[0], rows=((40, 1), (0, 9)))),
    "canonical product": (("_row_product",), lambda: row_product(*laws.draw((70, 40), (40, 140), dtype=BF16), BF16)),
    "cross entropy": (("_cross_entropy",), lambda: cross_entropy(37, TERMS["all"])),
    "scale": (("_scale",), scaled),
    "dropout": (
        ("_dropout",),
        passes(lambda impl, x, r: dropout_add(x, r, 0.3, prng.key(1), 6, impl=impl), (3, 1100), (3, 1100)),
    ),
    "float8": (("_quantise",), lambda: to_float8("rowwise")),
    "gathered float8": (("_float8_move",), gathered),
    "swiglu": (
        ("_glu_forward", "_glu_backward"),
        passes(lambda impl, a, b: glu.swiglu(a, b, impl=impl), (3, 1000), (3, 1000)),
    ),
    "gradient norm": (
        ("_square_sums",),
        lambda: grad_norm.grad_norm(laws.draw((4, 9), (3,), (7,), (2, 5), dtype=F32), impl="triton"),
    ),
    "grouped": (("_grouped_mm", "_grouped_mm_dw"), lambda: grouped(40, 35)),
    "grouped float8": (("_grouped_float8", "_grouped_float8_dw"), lambda: grouped_float8(40, 35)),
    "rows of experts": (("_spread", "_collect", "_collect_backward"), rows_of_experts),
    "routes": (("_route_forward", "_route_backward", "_rank", "_scatter_rows"), route),
    "add_layer_norm": (NORMS, normed("add_layer_norm")),
    "magnitudes": ((*NORMS, "_glu_forward", "_glu_backward"), magnitudes),
    "symmetric": (
        ("_symmetric",),
        lambda: newton_schulz.symmetric_product(*laws.draw((2, 70, 33), dtype=BF16), None, 1.0, 0.0),
    ),
    "adamw": (("_update_flat",), lambda: updated("adamw", "stochastic")),
    "adamw in 8 bits": (("_update_blocks",), lambda: updated("adamw", "8 bits")),
    "int4": (CODES, lambda: coded("int4")),
    "rope": (("_rope",), passes(rotated, (1, 5, 2, 6))),
}

MORE = {
    **{f"attention, {pattern}": (FLASH, attend(pattern, dtype=BF16)) for pattern in PATTERNS},
    **{
        f"attention over pages, {p}": (PAGED, functools.partial(attend_pages, p, rows=((40, 1), (0, 9))))
        for p in (PATTERNS[1], PATTERNS[-1])
    },
    "attention by blocks, causal": (MASKED, lambda: attend_by_blocks(causal=True)()),
    "attention without documents": (FLASH, attend(PATTERNS[0], documents=False)),
    **{
        f"attention at, {pattern}": (FLASH, functools.partial(attend_at, pattern, 40, 70, documents=True))
        for pattern in PATTERNS
    },
    **{
        f"cross entropy, {name}": (("_cross_entropy",), functools.partial(cross_entropy, 300, terms))
        for name, terms in TERMS.items()
    },
    "float8 with one scale": (("_quantise",), lambda: to_float8("tensorwise")),
    "grouped, odd": (("_grouped_mm", "_grouped_mm_dw"), lambda: grouped(67, 66)),
    "grouped float8, odd": (("_grouped_float8", "_grouped_float8_dw"), lambda: grouped_float8(67, 66)),
    **{name: (NORMS, normed(name, BF16)) for name in ("rms_norm", "layer_norm", "add_rms_norm")},
    **{
        f"{name}, {state}": (
            ("_update_blocks" if state == "8 bits" else "_update_flat",),
            functools.partial(updated, name, state),
        )
        for name in leaves.OPS
        for state in leaves.STATES
    },
    **{f"{kind} of one row": (CODES, functools.partial(coded, kind, (5000,))) for kind in KINDS},
    **{
        f"{kind} by chance": (CODES, functools.partial(coded, kind, key=prng.key(5), first=4))
        for kind in KINDS
        if not KINDS[kind].levels
    },
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_programs_have_memory_of_their_own(name, small_blocks):
    kernels, call = (CASES | MORE)[name]
    with watched_programs() as watch:
        call()
    for kernel in kernels:
        assert any(min(grid) > 1 for grid in watch.grids[kernel]), f"{kernel}: no several programs: {watch.grids}"


def test_no_kernel_is_left_out():
    ours = {build.kernel for _, build in aot.builds(aot.ARCHS["sm_90"])}
    assert {kernel for kernels, _ in CASES.values() for kernel in kernels} == ours


# ---- kernels that are made to ----------------------------------------------------------------------------------------


@triton.jit
def _add_to_a_row(X, OUT, n, ATOMIC: tl.constexpr, BLOCK: tl.constexpr):
    """Each program adds a row of X [programs, n] to OUT [n]."""
    at = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0) * n + at, mask=at < n)
    if ATOMIC:
        tl.atomic_add(OUT + at, x, mask=at < n)
    else:
        tl.store(OUT + at, tl.load(OUT + at, mask=at < n) + x, mask=at < n)


@triton.jit
def _copy(X, OUT, n, LOADS: tl.constexpr, STORES: tl.constexpr, BLOCK: tl.constexpr):
    """Copy X [n], of which the last program loads and stores so many more."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.load(X + at, mask=at < n + LOADS, other=0.0), mask=at < n + STORES)


@triton.jit
def _store_in_one_row(OUT, EQUAL: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = 7 if EQUAL else tl.program_id(0)
    tl.store(OUT + at, at + value)


@triton.jit
def _from_the_one_before(OUT):
    """Each program stores one more than what the one before it has stored."""
    i = tl.program_id(0)
    tl.store(OUT + i + 1, tl.load(OUT + i) + 1.0)


@triton.jit
def _store_at(TABLE):
    tl.store(tl.load(TABLE + tl.program_id(0)).to(tl.pointer_type(tl.float32)), 1.0)


@triton.jit
def _take_numbers(OUT, COUNT, BESIDE: tl.constexpr):
    """Each program takes the next number, and stores it at its place."""
    number = tl.atomic_add(COUNT, 1)
    if BESIDE == "load":
        number = tl.load(COUNT)
    if BESIDE == "store":
        tl.store(COUNT, number)
    tl.store(OUT + tl.program_id(0), number)


def refused(match, kernel, *given, **constants):
    with pytest.raises(AssertionError, match=match), watched_programs():
        kernel[(3,)](*given, **constants)


def test_a_row_that_all_programs_add_to_is_a_race():
    x, out = laws.draw((3, 10), (10,), dtype=F32)
    of = "byte 0 of OUT, float32 \\[10\\] with strides \\[1\\]; 40 bytes in all"
    line = "_add_to_a_row: program \\(0, 0, 0\\) stores what program \\([12], 0, 0\\)"
    refused(f"{line} stores, {of}\n{line} loads, {of}", _add_to_a_row, x, out, 10, ATOMIC=False, BLOCK=16)


def test_atomic_sums_are_none_and_their_last_bits_are_declared():
    x, out = laws.draw((3, 10), (10,), dtype=F32)
    refused("_add_to_a_row: its programs .* leave other bits at byte", _add_to_a_row, x, out, 10, ATOMIC=True, BLOCK=16)
    expected = out.double() + x.double().sum(0)
    with watched_programs(sums={"_add_to_a_row": 1e-6}):
        _add_to_a_row[(3,)](x, out, 10, ATOMIC=True, BLOCK=16)
    assert_close(out, expected, rtol=1e-6, atol=1e-6)
    counts = torch.zeros(3, 10, dtype=torch.int32), torch.zeros(10, dtype=torch.int32)
    with watched_programs():
        _add_to_a_row[(3,)](*counts, 10, ATOMIC=True, BLOCK=16)


@pytest.mark.parametrize("loads, stores", [(1, 0), (0, 1)])
def test_an_element_beyond_the_end_is_not_touched(loads, stores):
    """There is memory, of other elements of the same tensor: the plain interpreter goes on."""
    x, whole = laws.draw((41,), (41,), dtype=F32)
    before = whole.clone()
    more = {"LOADS": loads, "STORES": stores, "BLOCK": 16}
    said = "program \\(2, 0, 0\\) {} 4 bytes outside of the launch's tensors, at byte 160 of {}, float32 \\[40\\]"
    refused(said.format(*(("loads", "X") if loads else ("stores", "OUT"))), _copy, x[:40], whole[:40], 40, **more)
    assert whole[32:].equal(before[32:])
    _copy[(3,)](x[:40], whole[:40], 40, **more)
    assert whole[:40].equal(x[:40]) and whole[40:].equal(before[40:]) == (not stores)


def test_what_lies_between_the_elements_is_outside():
    x, out = laws.draw((40,), (80,), dtype=F32)
    refused(
        "stores 4 bytes .* at byte 4 of OUT, .* strides \\[2\\]", _copy, x, out[::2], 40, LOADS=0, STORES=0, BLOCK=16
    )


@pytest.mark.parametrize("equal", [False, True])
def test_two_programs_that_store_at_one_place_race_also_with_equal_values(equal):
    out = torch.zeros(16, dtype=torch.int32)
    refused("stores what program .* stores, byte 0 of OUT, int32", _store_in_one_row, out, EQUAL=equal, BLOCK=16)
    allowed = {("_store_in_one_row", "OUT"): "all store the same"}
    found = contextlib.nullcontext() if equal else pytest.raises(AssertionError, match="leave other bits")
    with found, watched_programs(races=allowed):
        _store_in_one_row[(3,)](out, EQUAL=equal, BLOCK=16)
    with pytest.raises(AssertionError, match="stores what"), watched_programs(races={("_copy", "OUT"): "another one"}):
        _store_in_one_row[(3,)](out, EQUAL=equal, BLOCK=16)


def test_what_a_program_leaves_for_the_next_is_a_race_and_depends_on_the_order():
    out = torch.zeros(4)
    refused("stores what program .* loads, byte 4 of OUT", _from_the_one_before, out)
    allowed = {("_from_the_one_before", "OUT"): "to see the order alone"}
    with pytest.raises(AssertionError, match="in reverse leave other bits"), watched_programs(races=allowed):
        _from_the_one_before[(3,)](torch.zeros(4))


def test_numbers_in_the_order_of_programs_are_found_by_the_order_alone():
    out, count = (torch.zeros(n, dtype=torch.int32) for n in (3, 1))
    refused("its programs in reverse leave other bits at byte 0 of OUT", _take_numbers, out, count, BESIDE="")
    refused("updates what program .* loads, byte 0 of COUNT", _take_numbers, out, count, BESIDE="load")
    refused("stores what program .* updates, byte 0 of COUNT", _take_numbers, out, count, BESIDE="store")
    with pytest.raises(AssertionError, match="elements differ"), watched_programs(sums={"_take_numbers": 1e-3}):
        _take_numbers[(3,)](out, count, BESIDE="")


def test_the_law_of_a_second_run_watches():
    def f(impl, x):
        _store_in_one_row[(3,)](torch.zeros(16, dtype=torch.int32), EQUAL=True, BLOCK=16)
        return x * 2.0

    with pytest.raises(AssertionError, match="stores what"):
        laws.repeats(f, laws.draw((3,)))


def test_an_address_of_a_table_that_is_of_no_leaf():
    there = torch.zeros(3)
    table = torch.tensor([there.data_ptr() + 4 * i for i in range(3)])
    refused("_store_at: program \\(0, 0, 0\\) stores 4 bytes outside", _store_at, table)
    assert not there.any()


def test_a_launch_under_watch_leaves_what_it_leaves_without():
    x, out = laws.draw((3, 10), (3, 10), dtype=F32)
    expected = out.clone()
    with watched_programs() as watch:
        cross_entropy_triton.scale_by_kernel_(out, torch.tensor(3.0))
        _copy[(3,)](x, x, 30, LOADS=0, STORES=0, BLOCK=16)
    assert_same(out, 3.0 * expected)
    assert watch.grids == {"_scale": {(1,)}, "_copy": {(3,)}}


def test_an_interpreter_of_other_names_is_refused(monkeypatch):
    monkeypatch.delattr(interpreter.InterpreterBuilder, "create_masked_store")
    with pytest.raises(AttributeError, match="create_masked_store"), watched_programs():
        pass

"""Block masks: the layouts against DeepSpeed's definitions written out as loops, attention under them against a loop
over positions, and both forms against every law of a kernel."""

import itertools
import math

import kernel_laws as laws
import numpy as np
import pytest
import torch
from close import assert_close

import fzero
from fzero import optim
from fzero.core import observe, pytree
from fzero.kernels import BlockMask, attention, attention_masked, block_mask, registry
from fzero.run import block_mask_of

# ---- the layouts ----------------------------------------------------------------------------------------------------

CASES = [
    {"mode": "dense"},
    {"mode": "fixed"},
    {"mode": "fixed", "num_local_blocks": 4, "num_global_blocks": 2, "horizontal_global_attention": True},
    {"mode": "fixed", "different_layout_per_head": True, "num_different_global_patterns": 3, "num_local_blocks": 3},
    {"mode": "variable", "local_window_blocks": [1, 3, 2], "global_block_indices": [0, 4]},
    {
        **{"mode": "variable", "global_block_indices": [1, 6], "global_block_end_indices": [3, 20]},
        "horizontal_global_attention": True,
    },
    {"mode": "bigbird", "num_random_blocks": 0, "num_sliding_window_blocks": 5, "num_global_blocks": 2},
    {"mode": "bslongformer", "num_sliding_window_blocks": 1, "global_block_indices": [0, 5]},
    {"mode": "bslongformer", "global_block_indices": [2], "global_block_end_indices": [4]},
    {"mode": "local_sliding_window", "num_sliding_window_blocks": 4},
]


def by_definition(table, n, head):
    """The pairs (query block, key block) of DeepSpeed's configurations, kind by kind; random blocks are left out."""
    of = lambda name, default: table.get(name, default)  # noqa: E731
    mode, seen, everyone, rows = table["mode"], set(), set(), False
    every = [(i, j) for i in range(n) for j in range(n)]
    if mode == "dense":
        return set(every)
    if mode == "fixed":
        local, keep = of("num_local_blocks", 4), of("num_global_blocks", 1)
        seen = {(i, j) for i, j in every if i // local == j // local}
        before = (head % of("num_different_global_patterns", 1) + 1) * keep  # the end of its window
        for start in range(0, n, local):
            first = start + local - before
            if start + local > n:  # the last window is short
                first = min(first, n - keep)
            everyone |= {first + i for i in range(keep)}
    if mode == "variable":
        edges, sizes = [0], list(of("local_window_blocks", [4]))
        while edges[-1] < n:
            edges.append(edges[-1] + (sizes.pop(0) if len(sizes) > 1 else sizes[0]))
        seen = {(i, j) for i, j in every if any(a <= min(i, j) and max(i, j) < z for a, z in itertools.pairwise(edges))}
    if mode in ("bigbird", "bslongformer", "local_sliding_window"):
        half = of("num_sliding_window_blocks", 3) // 2
        seen = {(i, j) for i, j in every if -half <= i - j <= half}
    if mode in ("variable", "bslongformer"):
        starts = of("global_block_indices", [0])
        ends = of("global_block_end_indices", [start + 1 for start in starts])
        everyone = {block for start, end in zip(starts, ends) for block in range(start, end)}
    if mode == "bigbird":
        everyone = set(range(of("num_global_blocks", 1)))
    rows = of("horizontal_global_attention", mode in ("bigbird", "bslongformer"))
    return seen | {(i, j) for i, j in every if j in everyone or (rows and i in everyone)}


@pytest.mark.parametrize("table", CASES, ids=lambda table: " ".join(map(str, table.values())))
def test_a_layout_is_deepspeed_s(table):
    for direction in ("bidirectional", "unidirectional"):
        causal = direction == "unidirectional"
        both = table if table["mode"] == "dense" else {**table, "attention": direction}
        if causal and (table["mode"] == "dense" or table.get("horizontal_global_attention")):
            continue
        for n in (1, 3, 4, 7, 9):
            mask = block_mask_of({**both, "block": 2}, 2 * n - 1, heads=4)
            assert (mask.block, mask.causal, len(mask.blocks) > 1) == (2, causal, "different_layout_per_head" in table)
            for head in range(4):
                want = {(i, j) for i, j in by_definition(table, n, head) if j <= i or not causal}
                got = mask.blocks[head if len(mask.blocks) > 1 else 0]
                assert {(i, j) for i in range(n) for j in range(n) if got[i, j]} == want


def test_random_blocks_are_spread_and_differ_by_head_and_seed():
    drawn = block_mask.random_blocks(50 * 16, random=3, heads=40).blocks
    assert (drawn.sum(-1) == 3).all()
    share = drawn.mean((0, 1))  # of each column 2,000 draws with chance 3 / 50
    assert np.abs(share - 3 / 50).max() < 5 * math.sqrt(0.06 * 0.94 / 2000)
    heads = {drawn[i].tobytes() for i in range(40)}
    assert len(heads) == 40 and block_mask.random_blocks(800, random=3, seed=1).blocks[0].tobytes() not in heads
    causal = block_mask.random_blocks(800, random=3, causal=True).blocks[0]
    assert causal.sum(-1).tolist() == [1, 2, *[3] * 48] and not np.triu(causal, 1).any()
    rest = {"block": 32, "num_random_blocks": 2, "num_global_blocks": 1, "num_sliding_window_blocks": 1}
    mask = block_mask_of({"mode": "bigbird", "different_layout_per_head": True, **rest}, 1024, 4, seed=3)
    same = block_mask.bigbird_blocks(1024, 32, window=1, random=2, heads=4, seed=3)
    assert (mask.blocks == same.blocks).all() and not (mask.blocks[0] == mask.blocks[1]).all()


def test_a_mask_is_printed_counted_and_joined():
    mask = BlockMask(torch.tensor([[[0, 1], [1, 1]], [[1, 0], [0, 0]]]), 3, causal=True)
    assert str(mask).splitlines()[1:] == [". .", "x x", "", "x .", ". ."]
    assert mask.pairs(5, 5).tolist() == mask.visible(5, 5).sum((1, 2)).tolist() == [2 * 3 + 3, 6]
    wide = BlockMask(np.eye(2, 3, dtype=bool), 4)
    assert wide.pairs(7, 9).tolist() == wide.visible(7, 9).sum((1, 2)).tolist() == [4 * 4 + 3 * 4]
    joined = mask | BlockMask(np.array([[[1, 0], [0, 1]]]), 3, causal=True)
    assert joined.blocks.tolist() == [[[1, 0], [1, 1]], [[1, 0], [0, 1]]]


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: BlockMask(np.ones(3), 2), r"block mask: blocks are float64 \[3\]; they must be bool"),
        (lambda: BlockMask([[2, 1]], 2), "or 0 and 1"),
        (lambda: BlockMask([[1]], 0), "block is 0; it must be a whole number of at least 1"),
        (lambda: BlockMask([[1, 1]], 2, causal=True), "a causal mask has as many of both sides"),
        (lambda: BlockMask(np.ones((1, 0, 0), bool), 2), r"blocks are bool \[1, 0, 0\]; .*, at least 1 of each"),
        (lambda: BlockMask(np.ones((2, 0), bool), 2), r"blocks are bool \[1, 2, 0\]; .*, at least 1 of each"),
        (
            lambda: block_mask.dense_blocks(8, 4) | block_mask.dense_blocks(9, 4, causal=True),
            r"^block masks do not join: one has 1 x 2 x 2 blocks of 4, on cpu, the other 1 x 3 x 3 blocks of 4, "
            r"causal, on cpu; give masks alike in these, but for 1 head beside several$",
        ),
        (lambda: block_mask.dense_blocks(0), "block mask: t is 0; it must be a whole number of at least 1"),
        (lambda: block_mask.random_blocks(32, random=3), "random is 3; there are 2 blocks of 16 tokens"),
        (lambda: block_mask.global_blocks(32, global_ids=[(2, 1)]), r"global_ids has \(2, 1\)"),
        (lambda: block_mask.fixed_blocks(32, local=4, global_count=3), "global_count must divide local"),
        (
            lambda: block_mask.fixed_blocks(32, local=4, global_count=2, patterns=3),
            "global_count \\* patterns be at most local",
        ),
        (lambda: block_mask.variable_blocks(32, windows=[2, 0]), r"windows are \[2, 0\]"),
        (lambda: block_mask_of({"mode": "fixd"}, 32), r"sparse_attention: mode is 'fixd' \(did you mean fixed\?\)"),
        (
            lambda: block_mask_of({"num_random_blocks": 1}, 32),
            "'sparse_attention.num_random_blocks'.* of mode fix",
        ),
    ],
)
def test_what_is_no_mask_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


# ---- attention ------------------------------------------------------------------------------------------------------


BLOCKED = pytest.param("blocked", marks=pytest.mark.skipif(laws.DEVICE != "cpu", reason="a form for CPUs"))


def inputs(b, t, h, g, k, s=None, dtype=torch.float64):
    return laws.draw((b, t, h, k), (b, s or t, g, k), (b, s or t, g, k), dtype=dtype)


def form(mask, **options):
    return lambda impl, q, k, v: attention.attention(q, k, v, mask=mask, impl=impl, **options)


def documents_of(b, t):
    """Other lengths in every row; the last token is a document of its own."""
    at = torch.arange(t, device=laws.DEVICE)
    return torch.stack([(at + 5 * i) // max(2, t // 3) + 9 * (at == t - 1) for i in range(b)])


def there(mask):
    return mask.to(laws.DEVICE)


def by_hand(q, k, v, sees, documents=None, scale=None):
    """The sum over the positions that are seen, in plain Python; sees(head, query, key)."""
    out = torch.zeros_like(q)
    for i, t, j in np.ndindex(*q.shape[:3]):
        group = j // (q.shape[2] // k.shape[2])
        at = [s for s in range(k.shape[1]) if sees(j, t, s)]
        at = [s for s in at if documents is None or documents[i, s] == documents[i, t]]
        weights = [math.exp(float(q[i, t, j] @ k[i, s, group]) * (scale or q.shape[-1] ** -0.5)) for s in at]
        for s, weight in zip(at, weights):
            out[i, t, j] += weight / sum(weights) * v[i, s, group]
    return out


@pytest.mark.parametrize("impl", ("reference", "blocked"))
@pytest.mark.parametrize("table", CASES, ids=lambda table: " ".join(map(str, table.values())))
def test_attention_is_the_definition(table, impl):
    """Of lengths that blocks do not divide, in both directions, also of documents."""
    t, block = 17, 3
    for causal in (False, True):
        if causal and (table["mode"] == "dense" or table.get("horizontal_global_attention")):
            continue
        direction = {} if table["mode"] == "dense" else {"attention": ("bi", "uni")[causal] + "directional"}
        mask = block_mask_of({**table, **direction, "block": block}, t, heads=4)
        pairs = [by_definition(table, -(-t // block), head) for head in range(4)]
        q, k, v = (x.cpu() for x in inputs(2, t, 4, 2, 3))
        sees = lambda h, i, j, pairs=pairs, causal=causal: (  # noqa: E731
            (i // block, j // block) in pairs[h] and (j <= i or not causal)
        )
        for options in ({}, {"documents": documents_of(2, t).cpu(), "scale": 0.3}) if causal else ({},):
            got = attention.attention(q, k, v, mask=mask, impl=impl, **options)
            assert_close(got, by_hand(q, k, v, sees, **options), rtol=1e-12, atol=1e-14)


def some_masks(t):
    """Of every kind, with heads that differ, and rows and columns that see nothing and are not seen."""
    empty = np.zeros((2, -(-t // 16), -(-t // 16)), bool)
    empty[0, 0, -1] = empty[1, -1, 0] = True
    return {
        "longformer": block_mask.longformer_blocks(t, 16, global_ids=[1]),
        "fixed causal": block_mask.fixed_blocks(t, 16, local=2, heads=4, patterns=2, causal=True),
        "bigbird": block_mask.bigbird_blocks(t, 32, window=1, heads=4),
        "nearly empty": BlockMask(empty.repeat(2, 0), 16),
        "large blocks": block_mask.variable_blocks(t, 128, windows=[1]),
    }


@pytest.mark.parametrize("name", some_masks(1))
@pytest.mark.parametrize("impl", (BLOCKED, "triton"))
def test_numbers(name, impl, monkeypatch):
    monkeypatch.setattr(attention_masked, "MAX_SCORES", 3 * 16 * 16 * 2)
    t = 130 if name == "large blocks" else 70
    mask = there(some_masks(t)[name])
    f, given = form(mask, documents=documents_of(1, t) if name == "bigbird" else None), inputs(1, t, 4, 2, 8)
    laws.numbers(f, given, torch.float32 if name == "fixed causal" else torch.bfloat16, impl)
    if impl == "blocked":
        assert_close(
            *(laws.both_passes(lambda *x, by=by: f(by, *x), given) for by in (impl, "reference")), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("impl", (BLOCKED, "triton"))
def test_every_law(impl):
    mask, given = there(block_mask.sliding_blocks(20, 16)), inputs(1, 20, 2, 1, 16)
    for law in (laws.repeats, laws.strides, laws.adjoint, laws.transforms, laws.traced):
        law(form(mask), given, impl=impl)
    fewer = there(BlockMask(np.tri(2, 3, 1, dtype=bool), 16))
    laws.numbers(form(fewer), inputs(1, 20, 2, 1, 4, s=40), torch.float16, impl)


def test_derivatives():
    laws.derivatives(form(there(BlockMask([[0, 1], [0, 0]], 2))), inputs(1, 4, 2, 1, 2))


@pytest.mark.parametrize("impl", ("reference", BLOCKED, "triton"))
def test_what_sees_nothing_is_zero_and_has_no_gradient(impl):
    """Queries 16 to 31 by the mask, and the first by its document."""
    mask, given = there(BlockMask([[0, 1, 0], [0, 0, 0], [0, 1, 0]], 16)), inputs(1, 40, 1, 1, 4, dtype=torch.float32)
    at = torch.arange(40, device=laws.DEVICE)
    f = form(mask, documents=(at == 0).int()[None])
    (out,), grads = laws.both_passes(lambda *x: f(impl, *x), given)
    seen, visible = (at // 16 != 1) & (at > 0), at // 16 == 1
    assert not out[0, ~seen].any() and not grads[0][0, ~seen].any() and out[0, seen].all()
    assert all(not x[0, ~visible].any() and x[0, visible].all() for x in grads[1:])


def test_memory_does_not_grow_with_the_square():
    """The largest tensor of both passes, for twice the length, is at most twice as large."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            found = [x.numel() for x in pytree.leaves(out) if isinstance(x, torch.Tensor)]
            self.numbers = max([self.numbers, *found])
            return out

    largest = []
    for t in (2048, 4096):
        tensors = [x.cpu().requires_grad_() for x in inputs(1, t, 1, 1, 8, dtype=torch.float32)]
        with Largest() as mode:
            attention.attention(*tensors, mask=block_mask.longformer_blocks(t, 64), impl="blocked").sum().backward()
        largest.append(mode.numbers)
    assert largest[1] <= max(attention_masked.MAX_SCORES, 2 * largest[0]) < 4096 * 4096 / 8


def test_gradients_per_example():
    q, k, v = (x.cpu() for x in inputs(3, 20, 2, 1, 4))
    mask = block_mask.longformer_blocks(20, 4, global_ids=[1])
    of_one = torch.func.grad(
        lambda q, k, v: (attention.attention(q[None], k[None], v[None], mask=mask) ** 3).sum(), (0, 1, 2)
    )
    got = torch.func.vmap(of_one)(q, k, v)
    alone = [of_one(*(x[i] for x in (q, k, v))) for i in range(3)]
    assert_close(list(got), [torch.stack(x) for x in zip(*alone)], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("compiled", (False, pytest.param(True, marks=pytest.mark.slow)))
def test_an_encoder_is_trained_by_either_form_alike(compiled):
    """A plain loss function, whose step is that of the reference."""
    mask, tokens = block_mask.bigbird_blocks(40, 8, heads=2), torch.arange(80).reshape(2, 40) % 16

    def loss(impl):
        def of(params, batch):
            x = params["embed"][batch["tokens"]].unflatten(-1, (2, 4))
            x = x + attention.attention(x, x, x @ params["v"], mask=mask, impl=impl)
            nats = torch.nn.functional.cross_entropy(x.flatten(2) @ params["embed"].T @ params["o"], batch["targets"])
            return nats * 80, torch.tensor(80)

        return of

    params = dict(
        zip(("embed", "v", "o"), (x.cpu() for x in laws.draw((16, 8), (4, 4), (16, 40), dtype=torch.float32)))
    )
    losses = {}
    for impl in ("blocked", "reference"):
        plan, tx = fzero.zero_plan(0, params, fzero.one_process()), optim.sgd(0.1)
        state = fzero.init_state(params, tx, plan, seed=0)
        step = fzero.make_train_step(loss(impl), tx, plan, execution=fzero.Execution(compiled=compiled))
        with observe() as used:
            for _ in range(3):
                state, metrics = step(state, {"tokens": tokens, "targets": tokens})
        losses[impl] = float(metrics.loss)
        assert used["attention"] == {impl}
    assert_close(torch.tensor(losses["blocked"]), torch.tensor(losses["reference"]), rtol=1e-5)


def test_the_registry_says_which_form_and_why():
    q, k, v = inputs(1, 40, 2, 1, 8, dtype=torch.float32)
    mask = there(block_mask.longformer_blocks(40, 10))
    said = registry.explain("attention", q, k, v, mask=mask)
    assert "multiples of 16" in said.reasons["triton"] and said.flops == 4 * 2 * 8 * int(mask.pairs(40, 40)[0])
    assert registry.explain("attention", q.cpu(), k.cpu(), v.cpu(), mask=mask.to("cpu")).chosen == "blocked"
    for wrong, message in (
        ({"mask": block_mask.dense_blocks(50, 10)}, "1 heads of 5 x 5 blocks of 10 tokens; 40 queries of 40 keys"),
        (
            {"mask": block_mask.random_blocks(40, 10, heads=3)},
            r"in 1 or 2 heads \(under tp a rank's\)",
        ),
        ({"mask": mask.to("meta")}, r"the mask is on meta and q on .*use mask.to\(q.device\)"),
        (
            {"mask": mask, "documents": torch.zeros(2, 40, dtype=torch.int32, device=laws.DEVICE)},
            r"documents are torch.int32 \[2, 40\]",
        ),
        ({"mask": mask, "documents": torch.zeros(1, 40).to(q)}, "give a tensor of whole numbers"),
        ({"mask": mask, "documents": torch.zeros_like(q[0, :2, 0], dtype=torch.int32)}, r"are torch.int32 \[2, 8\]"),
        ({"mask": mask.blocks}, "the mask is a ndarray; give a BlockMask"),
        ({"mask": mask, "scale": torch.tensor(0.5)}, "multiply q by one that is learned"),
        ({"mask": mask, "scale": math.nan}, "give a finite number"),
        ({"mask": mask, "cap": 3.0}, "a mask is given, and cap; beside it give documents and scale"),
    ):
        with pytest.raises(ValueError, match=message):
            attention.attention(q, k, v, **wrong)
    with pytest.raises(ValueError, match="40 queries have 38 keys; a causal mask takes equal numbers"):
        attention.attention(q, k[:, :38], v[:, :38], mask=there(block_mask.dense_blocks(40, 10, causal=True)))


@pytest.mark.parametrize("impl", ("auto", "reference", "blocked"))
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k, v[:, :39]), "as many tokens and heads as each other"),
        (lambda q, k, v: (q, k, v.repeat(1, 1, 2, 1)), "as many tokens and heads as each other"),
        (lambda q, k, v: (q[:, :, :1], k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)), "give a multiple of k's heads"),
        (lambda q, k, v: (q, k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1)), "k and v have q's rows"),
        (lambda q, k, v: (q, k, v.double()), "give tensors .* of one floating dtype"),
        (lambda q, k, v: (q, k, v[..., :4]), "they must be alike"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_every_form(change, message, impl):
    mask = there(block_mask.sliding_blocks(40, 10))
    with pytest.raises(ValueError, match=message):
        attention.attention(*change(*inputs(1, 40, 2, 1, 8, dtype=torch.float32)), mask=mask, impl=impl)
    if "alike" not in message:
        with pytest.raises(ValueError, match=message):
            attention.attention(*change(*inputs(1, 40, 2, 1, 8, dtype=torch.float32)), impl=impl)


WRONG = {
    "a block of half": (lambda: block_mask.BlockMask(np.ones((2, 2), bool), 16.5), "block is 16.5"),
    "a word for causal": (lambda: block_mask.BlockMask(np.ones((2, 2), bool), 16, "no"), "causal is 'no'"),
    "rows of two lengths": (lambda: block_mask.BlockMask([[1], [0, 1]], 16), "blocks are"),
    "no head": (lambda: block_mask.BlockMask(np.ones((0, 2, 2), bool), 16), "heads or 1"),
    "no device": (lambda: block_mask.dense_blocks(32).to("foo"), "device is 'foo'"),
    "a number beside |": (lambda: block_mask.dense_blocks(32) | 3, "give another BlockMask"),
    "tokens of half": (lambda: block_mask.dense_blocks(32.5), "t is 32.5"),
    "a window of NaN": (lambda: block_mask.sliding_blocks(64, window=math.nan), "window is nan"),
    "one block for several": (lambda: block_mask.global_blocks(64, global_ids=1), "global_ids is 1"),
    "half a block": (lambda: block_mask.global_blocks(64, global_ids=[1.5]), "global_ids"),
    "three ends": (lambda: block_mask.global_blocks(64, global_ids=[(1, 2, 3)]), "global_ids has"),
    "a large seed": (lambda: block_mask.random_blocks(64, seed=2**40), "seed is 1099511627776; it must be below"),
    "windows of half": (lambda: block_mask.variable_blocks(96, windows=[1.5]), "windows"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_of_a_mask_that_cannot_be_is_one_line(name):
    call, message = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        call()
    assert "\n" not in str(caught.value) and "object" not in str(caught.value)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_no_score_is_rounded_before_its_softmax(dtype):
    q, k, v = inputs(1, 64, 2, 2, 32, dtype=torch.float32)
    q, k, v = (16 * q).to(dtype), k.to(dtype), v.to(dtype)
    mask = there(block_mask.dense_blocks(64, 16))
    causal = block_mask.dense_blocks(64, 16, causal=True)
    for options in ({"mask": mask}, {}):
        exact = (mask if options else there(causal)).visible(64, 64)[0]
        scores = torch.einsum("bthk,bshk->bhts", q.double(), k.double()) / 32**0.5
        want = torch.einsum("bhts,bshk->bthk", scores.masked_fill(~exact, -math.inf).softmax(-1), v.double())
        for impl in ("reference", "blocked"):
            got = attention.attention(q.cpu(), k.cpu(), v.cpu(), **options, impl=impl).double()
            assert float((got - want).abs().max()) < 4 * torch.finfo(dtype).eps * float(v.abs().max()), (options, impl)

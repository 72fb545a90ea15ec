"""Mistakes planted in context parallelism, each of which must be caught by steps that equal those of one process, by
attention that equals the definition, or by the rounding that joins may have."""

import functools
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import ranks
import test_attention_at
import test_ring
import torch
from close import assert_close
from test_context import options_of
from zero_cases import packed_batch_for, train, whole

import fzero
from fzero.comm import all_gather_same
from fzero.core import Future, compile_cache, have_compiler
from fzero.kernels import attention_ring, attention_tiled
from fzero.models import cp_attention, experts, layers
from fzero.sharding import Context, Pieces
from fzero.train import gradient

contiguous, zigzag = (Context("gather", pieces).pieces_for for pieces in ("contiguous", "zigzag"))

gpt2 = import_module("fzero.models.gpt2")  # the package exports a function of this name
GATHER, RING = options_of("gather"), options_of("ring", "zigzag")
CHOSEN, ULYSSES = options_of("gather", "balanced"), options_of("ulysses", "zigzag")


def wrap(owner, name, change):
    """Replaces owner.name by change(the original) for a while."""
    return mock.patch.object(owner, name, change(getattr(owner, name)))


# ---- in a step -------------------------------------------------------------------------------------------------------


def contiguous_rope():
    """RoPE turns by the positions of contiguous blocks, whatever blocks a rank has."""

    def wrong(real):
        def positions_of(x, ctx):
            cp = ctx.mesh["cp"]
            return contiguous(cp.size).positions(cp.rank, cp.size * x.shape[1]) if cp.size > 1 else real(x, ctx)

        return positions_of

    return wrap(cp_attention, "positions_of", wrong)


def counted_by_every_rank():
    """Every rank of cp counts the tokens of whole sequences."""

    def wrong(real):
        def sum_losses(losses, mesh, *over):
            times = mesh["cp"].size
            return real([out._replace(num_tokens=out.num_tokens * times) for out in losses], mesh, *over)

        return sum_losses

    return wrap(gradient, "sum_losses", wrong)


def edge_off_by_one():
    """A document begins one token late: for queries and keys of a rank, wherever its blocks lie."""

    def late(real):
        def attention(q, k, v, pattern, ctx, **scores):
            numbers = ctx.tokens.documents
            if isinstance(numbers, torch.Tensor):
                numbers = torch.cat((numbers[:, :1], numbers[:, :-1]), 1)
            return real(q, k, v, pattern, ctx._replace(tokens=ctx.tokens._replace(documents=numbers)), **scores)

        return attention

    return mock.patch.dict(cp_attention.OVER_CP, {name: late(real) for name, real in cp_attention.OVER_CP.items()})


def edge_off_by_one_for_keys():
    """The documents of a ring's keys are those of the tokens before them."""

    def wrong(real):
        def where(self, hop):
            found = real(self, hop)
            return found._replace(key_documents=self.documents[:, (found.key - 1).clamp(min=0)])

        return where

    return wrap(attention_ring.Ring, "positions_at", wrong)


def in_the_order_of_ranks():
    """Gathered keys stay one rank's after the other's, so that those of a later block stand before a query."""
    return mock.patch.object(Pieces, "order", lambda self, tokens, device="cpu": torch.arange(tokens, device=device))


def later_keys_of_a_ring():
    """Keys up to one block behind a query's own are seen."""

    def wrong(real):
        def where(self, hop):
            found = real(self, hop)
            return found._replace(key=(found.key - len(found.key) // 2).clamp(min=0))

        return where

    return wrap(attention_ring.Ring, "positions_at", wrong)


def later_keys_of_chosen_blocks():
    """The same of blocks that the batch chooses."""

    def wrong(real):
        return lambda q, k, v, positions, **more: real(
            q, k, v, positions=positions._replace(query=positions.query + 1), **more
        )

    return wrap(cp_attention, "attention", wrong)


def narrow_join():
    """Parts of a softmax are joined in bfloat16."""

    def wrong(real):
        def join(a, b):
            out, lse = real(*(tuple(x.bfloat16() for x in part) for part in (a, b)))
            return out.to(a[0].dtype), lse.to(a[1].dtype)

        return join

    return wrap(attention_ring, "join", wrong)


def local_dropout():
    """Dropout's masks are those of the first tokens of a sequence on every rank."""

    def wrong(real):
        return lambda tokens, ctx: ([(0, tokens)], real(tokens, ctx)[1])

    return wrap(layers, "ranges_outside", wrong)


def own_keys_alone():
    """The gradients of a rank's keys are those by its own queries alone: own_slice as the transpose of a gather."""
    return mock.patch.object(cp_attention, "all_gather", all_gather_same)


def last_hop_not_sent():
    """A ring's gradients of keys and values stay where their last hop is computed."""

    def wrong(real):
        def backward(self, *args):
            pass_on, hops = self.pass_on, []

            def counted(x):
                coming = pass_on(x)
                hops.append(x)
                return coming if len(hops) < 2 * self.count - 1 else Future(lambda: coming.wait() * 0 + x)

            self.pass_on = counted
            return real(self, *args)

        return backward

    return wrap(attention_ring.Ring, "backward", wrong)


def results_in_the_order_of_tokens():
    """Ulysses sends results back as they lie in the sequence, and not as the ranks' blocks do."""

    def wrong(real):
        def exchange(x, axis, split, join, *, leaf):
            x = x.index_select(1, zigzag(axis.size).order(x.shape[1])) if leaf == "blocks/attn/out" else x
            return real(x, axis, split, join, leaf=leaf)

        return exchange

    return wrap(cp_attention, "all_to_all", wrong)


def learned_positions_of_the_first_tokens():
    """Learned positions are those of the first tokens on every rank."""
    return wrap(gpt2, "local_tokens", lambda real: lambda x, ctx: x[:, : x.shape[1] // ctx.mesh["cp"].size])


def balance_of_a_rank():
    """The balance sums of experts are those of a rank's own tokens."""
    alone = fzero.one_process()["cp"]
    return wrap(
        experts, "psum", lambda real: lambda x, axis, **more: real(x, alone if axis.name == "cp" else axis, **more)
    )


# mistake -> (how it is planted, model, options of train, dropout)
MISTAKES = {
    "contiguous RoPE on zigzag blocks": (contiguous_rope, "llama", GATHER, 0.0),
    "contiguous RoPE in a ring": (contiguous_rope, "llama", RING, 0.0),
    "tokens counted cp times": (counted_by_every_rank, "llama", GATHER, 0.0),
    "the edge of a document off by one, gather": (edge_off_by_one, "llama", GATHER, 0.0),
    "the edge of a document off by one, ulysses": (edge_off_by_one, "llama", ULYSSES, 0.0),
    "the edge of a document off by one, ring": (edge_off_by_one, "llama", RING, 0.0),
    "the edge of a document off by one for keys": (edge_off_by_one_for_keys, "llama", RING, 0.0),
    "keys of a later block seen, gather": (in_the_order_of_ranks, "llama", GATHER, 0.0),
    "keys of a later block seen, ring": (later_keys_of_a_ring, "llama", RING, 0.0),
    "keys of a later block seen, balanced": (later_keys_of_chosen_blocks, "llama", CHOSEN, 0.0),
    "a join in bfloat16": (narrow_join, "llama", RING, 0.0),
    "dropout by local index": (local_dropout, "gpt2", GATHER, 0.5),
    "own_slice as gather's transpose": (own_keys_alone, "llama", GATHER, 0.0),
    "the last hop of gradients not sent": (last_hop_not_sent, "llama", RING, 0.0),
    "results of ulysses in the order of tokens": (results_in_the_order_of_tokens, "llama", ULYSSES, 0.0),
    "learned positions of the first tokens": (learned_positions_of_the_first_tokens, "gpt2", RING, 0.0),
    "balance sums of a rank": (balance_of_a_rank, "moe dropless", GATHER, 0.0),
}
OFTEN = ("contiguous RoPE on zigzag blocks", "own_slice as gather's transpose", "keys of a later block seen, ring")


def stepped(mesh, name, options, dropout):
    # Blocks of a token would hide a mistake of half a block.
    how = {"rows": 6, "steps": 2, "dropout": dropout, "batches": functools.partial(packed_batch_for, length=16)}
    state, specs, log = train(mesh, name, "sgd", 3, 2, **how, **options)
    return whole(state, specs, mesh).params, log


def run(mesh, mistake):
    plant, *how = MISTAKES[mistake]
    with plant():
        return stepped(mesh, *how)


@functools.cache
def alone(name, dropout):
    return stepped(fzero.one_process(), name, {}, dropout)


@functools.cache
def expect_right(name, dropout, form, pieces):
    """Unplanted it is one process."""
    found = ranks.run(2, stepped, name, options_of(form, pieces), dropout, mesh={"cp": 2})[0]
    assert_close(found, alone(name, dropout), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mistake", [pytest.param(m, marks=[pytest.mark.slow] * (m not in OFTEN)) for m in MISTAKES])
def test_is_caught(mistake):
    _, name, options, dropout = MISTAKES[mistake]
    context = options["plan_options"]["sequence"]
    expect_right(name, dropout, context.form, context.pieces)
    wrong = ranks.run(2, run, mistake, mesh={"cp": 2})[0]
    with pytest.raises(AssertionError):
        assert_close(wrong, alone(name, dropout), rtol=1e-10, atol=1e-10)


def joined_narrowly(mesh, tokens, pieces):
    with narrow_join():
        return test_ring.in_bfloat16(mesh, tokens, pieces)


@pytest.mark.slow
def test_a_join_in_bfloat16_shows_beside_parts_in_bfloat16(monkeypatch):
    """Also where all else is bfloat16."""
    monkeypatch.setattr(test_ring, "in_bfloat16", joined_narrowly)
    with pytest.raises(AssertionError):
        test_ring.test_bfloat16_parts_are_joined_in_float32()


# ---- in the tile loops -----------------------------------------------------------------------------------------------

# What is written -> what is planted, in attention_tiled.cpp.
TILES = {
    "a tile that only touches the document": ("mine.high < theirs.low", "mine.high <= theirs.low"),
    "keys of a later block seen": ("bool all = nearest >= 0;", "bool all = true;"),
    "the edge of a document off by one": ("mine[x] == theirs ? s[x] : low", "mine[x] - theirs <= 1 ? s[x] : low"),
}


def attends(form):
    """Attention of queries on keys that do not begin with the first, and its gradients: in blocks, and shuffled with
    documents."""
    tokens, out = 260, []
    key = torch.arange(tokens).roll(37)
    for query in (zigzag(2).positions(0, tokens), torch.cat([torch.arange(tokens)[at::4] for at in (2, 0)])):
        q, k, v = test_attention_at.draw(1, len(query), tokens)
        numbers = {"query_documents": query // 64, "key_documents": key // 64} if out else {}
        at = functools.partial(form, query=query, key=key, **numbers)
        out += test_attention_at.laws.both_passes(at, (q, k, v))
    return out


@pytest.mark.exhaustive
@pytest.mark.skipif(not have_compiler(), reason="there is no C++ compiler")
@pytest.mark.parametrize("mistake", TILES)
def test_a_mistake_in_the_tile_loops_is_caught(mistake, tmp_path, monkeypatch):
    tiled, expected = (
        functools.partial(test_attention_at.attention_at, impl="tiled"),
        attends(test_attention_at.reference),
    )
    assert_close(attends(tiled), expected, rtol=1e-10, atol=1e-12)
    right, wrong = TILES[mistake]
    source = compile_cache.source_of(Path(attention_tiled.__file__).with_suffix(".cpp"))
    assert source.count(right) == 1
    (tmp_path / "attention_tiled.cpp").write_text(source.replace(right, wrong))
    library = compile_cache.library(str(tmp_path / "attention_tiled.py"), compile_cache.CONTRACTED, "OF_float64")
    monkeypatch.setattr(attention_tiled, "_library", lambda dtype: library)
    with pytest.raises(AssertionError):
        assert_close(attends(tiled), expected, rtol=1e-10, atol=1e-12)

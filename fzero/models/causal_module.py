"""The logits of an nn.Module for rows of tokens, by its own code, with its cache of keys and values in pages.

No graph is made, as each step has other shapes: the forward pass is called, with stand-ins for its layers. One call
notes what the layers of a stack get and ends before the last of them returns; then each layer runs when its parameters
are there; the call after the last stack goes on from what that left. Whether a cache of pages gives what a whole pass
does is found by computing, with random weights, under tp with those of one rank.

Rows of unlike lengths share a call as in transformers' own batches: shorter ones have masked positions before them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import graph_tracing, pytree
from fzero.core.captured_state import preserve_random_states
from fzero.core.graph_tracing import Watch
from fzero.core.pytree import Tree
from fzero.core.random_interception import is_drawing, seeded
from fzero.core.stack import Block
from fzero.models.base import Ctx
from fzero.models.module_layers import CannotSplit, any_numbers, any_rows, differ
from fzero.models.module_rehearsal import RUNS, CopiedModule, first_of
from fzero.models.module_split import ModuleCall, StackKind
from fzero.models.module_tp import Cuts, calling, divided, draws_of, replaced, specs_of, split_dims
from fzero.models.transformers_module import ENDLESS, POSITIONS, first_number
from fzero.models.user_functions import wide_sums
from fzero.sharding import Mesh

CACHES = ("cache", "past_key_values")  # the names that versions of transformers have for the argument
TEXTS = ((0, 1, 1, 0, 1, 0, 0, 1, 1, 1), (1, 0, 0, 1, 1, 0, 1))
CHUNKS = ((5, 3), (2, 2), (1, 1), (1, 1), (1, 0))  # the tokens of both texts in each step of a check
PAGE = 4  # positions of a page in a check
NUMBERS = itertools.count()
Entry = tuple[int, int]  # heads, and numbers of a head
LayerPages = Sequence[tuple[Tensor, ...]]  # of each layer: keys and values [P, page_tokens, heads, size]


class LayerCall(NamedTuple):
    """How a layer is called, as `ctx.prepared` of a Layered's block."""

    inputs: tuple[Any, Any]  # args, kwargs
    rows: int
    stacked: dict[str, dict[str, Tensor]]  # see Prepared


class Paging(NamedTuple):
    """What pages have of a module's positions."""

    entries: tuple[tuple[Entry, ...], ...] = ()  # of each layer; () where no cache is used
    padded: bool = False  # whether rows of unlike lengths share a call
    reason: str = ""  # why no cache is used


class RowGroup(NamedTuple):
    """Rows of a step that one call computes."""

    tokens: Tensor  # int64 [B, n]
    index: Tensor  # int64 [B, n]: the number of each token in the step; -1 for those of no row
    past: Tensor | tuple[()] = ()  # int64 [B], the positions before; () without a cache
    lines: Tensor | tuple[()] = ()  # int64 [B, S]: the line in the pages of each key
    mask: Tensor | tuple[()] = ()  # int64 [B, S], 0 before a shorter row; () for rows of one length


def cached_groups(
    tokens: Tensor, positions: Tensor, starts: Tensor, table: Tensor, page_tokens: int, padded: bool
) -> list[RowGroup]:
    """The groups of a step's rows by their new tokens, and, unless `padded`, by the positions before."""
    bounds, firsts, groups = starts.tolist(), positions.tolist(), dict[Any, list[int]]()
    for row, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start < end:
            groups.setdefault((end - start, 0 if padded else firsts[start]), []).append(row)
    out, like = [], {"dtype": torch.int64, "device": tokens.device}
    for (size, _), rows in groups.items():
        numbers = [firsts[bounds[row]] for row in rows]
        longest = max(numbers) + size
        index = torch.tensor([range(bounds[row], bounds[row] + size) for row in rows], **like)
        past = torch.tensor(numbers, **like)
        keys = torch.arange(longest, device=tokens.device) - (longest - size - past)[:, None]
        # A masked key is the row's first again: what nobody has written might be no number.
        pages, ahead = table[torch.tensor(rows, **like)].long(), keys.clamp(min=0)
        lines = pages.gather(1, ahead // page_tokens) * page_tokens + ahead % page_tokens
        mask = (keys >= 0).long() if len({*numbers}) > 1 else ()
        out.append(RowGroup(tokens[index], index, past, lines, mask))
    return out


class PagedKeys:
    """The keys and values of a group's rows, by layers, in pages."""

    def __init__(self, group: RowGroup, pages: LayerPages, numbers: Mapping[Any, int]) -> None:
        self.group, self.pages, self.numbers = group, pages, numbers
        assert isinstance(group.lines, Tensor)
        self.lines, self.past = group.lines, group.lines.shape[1] - group.tokens.shape[1]
        self.slots = self.lines[:, self.past :].reshape(-1)

    def update(self, layer: Any, *entries: Tensor) -> tuple[Tensor, ...]:
        """Write new keys and values [B, heads, n, size], and return those of all positions."""
        return tuple(self.exchange(*pair) for pair in zip(self.pages[self.numbers[layer]], entries, strict=True))

    def exchange(self, pages: Tensor, entry: Tensor) -> Tensor:
        """The same of keys or values."""
        flat = pages.flatten(0, 1)
        flat.index_copy_(0, self.slots, entry.transpose(1, 2).flatten(0, 1).to(pages.dtype))
        if not self.past:
            return entry
        read = flat.index_select(0, self.lines.reshape(-1)).unflatten(0, tuple(self.lines.shape))
        return read.transpose(1, 2).to(entry.dtype)


class NotedKeys:
    """In place of PagedKeys: the shapes of what layers write, without a past."""

    past = 0

    def __init__(self) -> None:
        self.entries: dict[Any, tuple[Entry, ...]] = {}

    def update(self, layer: Any, *entries: Tensor) -> tuple[Tensor, ...]:
        """Note and return keys and values [B, heads, n, size]."""
        if layer in self.entries:
            raise ValueError("a layer writes keys and values twice")
        self.entries[layer] = tuple((x.shape[1], x.shape[3]) for x in entries)
        return entries


@functools.lru_cache(maxsize=1)
def cache_class() -> type:
    """The class of caches, of transformers' kind, whose keys are PagedKeys or NotedKeys."""
    from transformers.cache_utils import Cache

    class PageCache(Cache):
        """A cache of full attention in all layers; windows are in the masks."""

        def __init__(self, keys: PagedKeys | NotedKeys) -> None:
            super().__init__(layers=[])
            self.keys, self.layer = keys, None  # the layer of a stack that runs

        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: Any, *args: Any, **kwargs: Any) -> Any:
            """The keys and values of all positions."""
            layer = ("outside", layer_idx) if self.layer is None else self.layer
            return self.keys.update(layer, key_states, value_states)

        def get_seq_length(self, layer_idx: Any = 0) -> int:
            """The positions before the new ones, during the whole pass."""
            return self.keys.past

        def get_mask_sizes(self, query_length: Any, layer_idx: Any = 0) -> tuple[int, int]:
            """(the number of keys, 0); older versions hand in the new positions."""
            return self.keys.past + (len(query_length) if isinstance(query_length, Tensor) else query_length), 0

    return PageCache


class LayersReached(Exception):
    """The end of a call that was made for what the layers get."""


class Forward:
    """The forward pass of a group of rows, as far as the parameters are there."""

    def __init__(self, module: CausalModule, group: RowGroup, keys: PagedKeys | NotedKeys | None, ctx: Ctx) -> None:
        self.module, self.group, self.ctx = module, group, ctx
        self.cache = None if keys is None else cache_class()(keys)
        copied, device = module.copied, group.tokens.device
        self.buffers = copied.buffers.to_device(device, ctx.dtype)
        self.stacked = {stack: constants.to_device(device, ctx.dtype) for stack, constants in copied.stacked.items()}
        self.calls: dict[int, tuple[list[Any], Any]] = {}  # of each layer: the leaves and structure of its arguments
        self.x: Any = None
        self.draws = False  # whether what is around the layers may draw random numbers
        self.exits: dict[str, Tensor] = {}  # what the stacks that have run returned

    def run(self, outside: Mapping[str, Tensor], stand_in: Callable[..., Any], **options: Any) -> Any:
        """What the module returns, with these parameters, and `stand_in(number, ...)` for its layers."""
        copied, state = self.module.copied, {**outside, **self.buffers}
        layers = [(layer, "forward", partial(stand_in, i)) for i, layer in enumerate(self.module.layers)]
        rows, arguments = len(self.group.tokens), {**self.module.arguments(self.group, self.cache), **options}
        draws: Callable[..., Any] = draws_of if self.module.draws else contextlib.nullcontext
        with calling(self.ctx, rows, draws=draws), wide_sums(state.values()), replaced(layers):
            out = ModuleCall(copied.skeleton, state, self.ctx.dtype)(self.group.tokens, **arguments)
            self.draws = is_drawing()
        return out

    def enter(self, outside: Mapping[str, Tensor]) -> None:
        """Note what the layers of the next stack get."""
        try:
            self.run(outside, self.stand_in)
        except LayersReached:
            return
        raise ValueError(f"{self.module.copied.name}: its layers are not called in the order of a training step")

    def stand_in(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """In place of a layer: what its stack returned, or, before that, what the layer gets."""
        kind, last = self.module.copied.layers[number][1], number in self.module.lasts
        leaves, treedef = pytree.flatten((args, kwargs))
        x = leaves[0]
        if kind.stack in self.exits:
            x = self.exits[kind.stack] if last else x
        else:
            self.calls[number] = leaves, treedef
            if last:
                raise LayersReached
        return self.module.forms[kind](x, leaves)

    def run_layer(self, number: int, block: Block, params: Tree) -> None:
        """x after a layer."""
        kind, (leaves, treedef) = self.module.copied.layers[number][1], self.calls.pop(number)
        x = leaves[0] if number in self.module.firsts else self.x
        inputs = pytree.unflatten([x, *leaves[1:]], treedef)
        layer = torch.full((), number, device=self.group.tokens.device)
        if self.cache is not None:
            self.cache.layer = number
        prepared = LayerCall(inputs, len(self.group.tokens), self.stacked)
        (self.x,) = block(params, (x,), self.ctx._replace(layer=layer, prepared=prepared))
        if self.cache is not None:
            self.cache.layer = None
        if number in self.module.lasts:
            self.exits[kind.stack] = self.x

    def logits(self, outside: Mapping[str, Tensor], wanted: Tensor) -> Tensor:
        """The logits [B, len(wanted), V] of these tokens of the rows."""
        if "logits_to_keep" in self.module.names:
            return logits_of(self.run(outside, self.stand_in, logits_to_keep=wanted))
        return logits_of(self.run(outside, self.stand_in))[:, wanted]


class CausalModule:
    """What generation uses of a module: its sizes, what a cache has of a position, and its logits.

    Raises ValueError for a module that gives no logits of tokens, or in which a token sees the ones after it.
    """

    def __init__(
        self, copied: CopiedModule, places: Mapping[str, str], cuts: Callable[[Mesh], dict[str, Cuts]] | None = None
    ) -> None:
        self.copied, self.places, self.cuts = copied, places, cuts
        self.number = next(NUMBERS)  # of this process
        self.names = frozenset(inspect.signature(copied.skeleton.forward).parameters)
        self.layers = [copied.skeleton.get_submodule(name) for name, _ in copied.layers]
        stacks = [kind.stack for _, kind in copied.layers]
        self.firsts = {stacks.index(stack) for stack in stacks}
        self.lasts = {len(stacks) - 1 - stacks[::-1].index(stack) for stack in stacks}
        self.forms: dict[StackKind, Callable[[Tensor, list[Any]], Any]] = {}
        self.cache_name = next((name for name in CACHES if name in self.names and self.of_transformers), "")
        self.numbers: dict[Any, int] = {}  # layer: its number in the entries
        self.draws, self.drew = True, False  # see Forward
        with self.random_weights(1, {}):
            self.vocab_size = self.check_logits()
            paging = Paging(reason="it has no cache of keys and values that a module of transformers takes")
            self.pagings = {1: self.find_cache() if self.cache_name else paging}  # by the size of tp
        self.draws = self.drew
        self.max_len = first_number(getattr(copied.skeleton, "config", None), POSITIONS, ENDLESS)

    def paging(self, mesh: Mesh) -> Paging:
        """What pages have of a position on a rank of a mesh."""
        size = mesh.tp.size if self.pagings[1].entries else 1
        if size not in self.pagings:
            assert self.cuts is not None  # else nothing is over tp
            with self.random_weights(size, self.cuts(mesh)):
                self.pagings[size] = self.find_cache()
        return self.pagings[size]

    @contextlib.contextmanager
    def random_weights(self, tp: int, cuts: Mapping[str, Cuts]) -> Iterator[None]:
        """There are random weights within, of which tp splits these: those of a rank alone, without sums over ranks."""
        copied, self.split = self.copied, (tp, cuts)
        with graph_tracing.outside_transforms(), preserve_random_states(), torch.no_grad(), seeded(0):
            self.outside = {name: any_rows(leaf.shape) for name, leaf in copied.parameters.items()}
            self.within = dict[str, dict[str, Tensor]]()
            for stack, leaves in copied.within.items():
                shapes = {name: [*leaf.shape] for name, leaf in leaves.items()}
                specs = specs_of(copied.templates[stack][0], cuts[stack]) if stack in cuts else {}
                for name, text in specs.items():
                    for dim in split_dims(text):
                        shapes[name][dim] //= tp
                self.within[stack] = {name: any_numbers(torch.Size(shape)) for name, shape in shapes.items()}
            yield
        del self.outside, self.within, self.split

    @property
    def of_transformers(self) -> bool:
        """Whether the module's class is of transformers, or derived from one that is."""
        return any(cls.__module__.partition(".")[0] == "transformers" for cls in type(self.copied.skeleton).__mro__)

    def arguments(self, group: RowGroup, cache: Any) -> dict[str, Any]:
        """The arguments of a call beside its tokens."""
        if cache is None:
            return {}
        out = {self.cache_name: cache, "use_cache": True}
        if isinstance(group.past, Tensor):
            new = torch.arange(group.tokens.shape[1], device=group.tokens.device)
            out |= {"position_ids": group.past[:, None] + new, "attention_mask": group.mask}
        return {name: value for name, value in out.items() if name in self.names and not isinstance(value, tuple)}

    def run(
        self,
        groups: Sequence[RowGroup],
        parts: Iterable[tuple[Block | None, Tree]],
        ctx: Ctx,
        pages: LayerPages | None = None,
        wanted: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """The logits [B, len(wanted), V] of each group's wanted tokens, of all without `wanted`.

        parts: (a layer's function, its leaves), and (None, leaves) of what is around layers, in the order of a pass.
        """
        columns = wanted or [torch.arange(group.tokens.shape[1], device=group.tokens.device) for group in groups]
        passes = [
            Forward(self, group, None if pages is None else PagedKeys(group, pages, self.numbers), ctx)
            for group in groups
        ]
        outside, number = dict[str, Tensor](), 0
        for block, params in parts:
            if block is None:
                named = pytree.named_leaves(params)
                outside |= {n: named[leaf].to(ctx.dtype) for n, leaf in self.places.items() if leaf in named}
                continue
            for forward in passes:
                if number in self.firsts:
                    forward.enter(outside)
                forward.run_layer(number, block, params)
            number += 1
        return [forward.logits(outside, columns[i]) for i, forward in enumerate(passes)]

    def check_logits(self) -> int:
        """The size of the vocabulary; raises ValueError for a module that gives no logits of TEXTS."""
        copied, whole = self.copied, []
        for text in TEXTS:
            try:
                out = self.run_whole(text, None)
            except graph_tracing.Impure:
                raise
            except Exception as error:  # of somebody else's code
                line = (str(error).splitlines() or [""])[0]
                raise ValueError(
                    f"{copied.name}: called with tokens, int64 {[1, len(text)]}, it raises {type(error).__name__}: "
                    f"{line}; a model that generates takes tokens [B, T] and returns logits [B, T, V], or an object "
                    "with .logits"
                ) from None
            logits = logits_of(out)
            if not isinstance(logits, Tensor) or logits.shape[:-1] != (1, len(text)):
                shape = list(logits.shape) if isinstance(logits, Tensor) else type(out).__name__
                raise ValueError(
                    f"{copied.name} returns {shape} for tokens {[1, len(text)]}, and has no logits to generate by; "
                    "they are [B, T, V], or the .logits of an object"
                )
            whole.append(logits[0])
        if differ(logits_of(self.run_whole(TEXTS[0][:4], None))[0], whole[0][:4]):
            raise ValueError(f"{copied.name}: a token sees the ones after it, so that it generates no text")
        return whole[0].shape[-1]

    def run_whole(self, text: Sequence[int], keys: NotedKeys | None) -> Any:
        """What the module returns for a text with the random weights, each layer where it is called."""
        tokens = torch.tensor([text])
        forward = Forward(self, RowGroup(tokens, torch.arange(len(text))[None]), keys, Ctx())

        def stand_in(number: int, *args: Any, **kwargs: Any) -> Any:
            kind = self.copied.layers[number][1]
            if forward.cache is not None:
                forward.cache.layer = number
            leaves = pytree.leaves((args, kwargs))
            if self.runs_in_check(number):
                prepared = LayerCall((args, kwargs), 1, forward.stacked)
                out = self.call_layer(kind, Ctx(layer=torch.tensor(number), prepared=prepared))
                self.forms.setdefault(kind, form_of(out, leaves))
            else:
                out = self.forms[kind](leaves[0], leaves)
            if forward.cache is not None:
                forward.cache.layer = None
            return out

        guarded = {f"the parameter {name}": leaf for name, leaf in self.outside.items()}
        guarded |= {f"the buffer {name}": leaf for name, leaf in forward.buffers.items()}
        for stack, leaves in forward.stacked.items():
            guarded |= {f"the buffer {name} of {stack}": leaf for name, leaf in leaves.items()}
        with Watch(guarded, originals=self.copied.originals()):
            out = forward.run(self.outside, stand_in)
        self.drew |= forward.draws
        return out

    def call_layer(self, kind: StackKind, ctx: Ctx) -> Any:
        """What a layer returns with the random weights."""
        inputs, rows, stacked = ctx.prepared
        size, cuts = self.split[0], self.split[1].get(kind.stack, Cuts())
        tensors = {**self.within[kind.stack], **self.copied.layer_buffers(kind, stacked, ctx.layer)}
        with divided(self.copied.templates[kind.stack][kind.number], cuts, size):
            return self.copied.call_layer(kind, tensors, inputs, ctx, rows, cuts, detect_draws=True)

    def runs_in_check(self, number: int) -> bool:
        """Whether a layer is among the first of its kind; the others pass on what they get."""
        kinds = [kind for _, kind in self.copied.layers]
        return kinds[:number].count(kinds[number]) < RUNS

    def find_cache(self) -> Paging:
        """What a cache has of a position, where it gives the logits of whole passes; else the reason."""
        name, noted = self.copied.name, NotedKeys()
        try:
            whole = [logits_of(self.run_whole(text, None))[0] for text in TEXTS]
            self.run_whole(TEXTS[0], noted)
            kinds = {kind: noted.entries[i] for i, (_, kind) in enumerate(self.copied.layers) if i in noted.entries}
            for i, (_, kind) in enumerate(self.copied.layers):
                if kind in kinds:
                    noted.entries.setdefault(i, kinds[kind])
            if not noted.entries:
                return Paging(reason=f"{name} writes no keys and values into the cache it is given")
            self.numbers = {layer: i for i, layer in enumerate(noted.entries)}
            for padded in (True, False):
                if not any(map(differ, self.run_chunks(list(noted.entries.values()), padded), whole)):
                    return Paging(tuple(noted.entries.values()), padded)
            return Paging(reason=f"{name} gives other logits with its cache than without")
        except CannotSplit:  # by the number of a layer, which has states of its own
            return Paging(reason=f"{name} takes another cache than one of keys and values")
        except Exception as error:  # of somebody else's code, with a cache that is not of its kind
            line = (str(error).splitlines() or [""])[0].partition(" (")[0]
            text = f"{name} takes another cache than one of keys and values ({type(error).__name__}: {line})"
            return Paging(reason=text)

    def run_chunks(self, entries: Sequence[tuple[Entry, ...]], padded: bool) -> list[Tensor]:
        """The logits of TEXTS with the random weights, in chunks of unlike rows, by pages."""
        count = [-(-len(text) // PAGE) for text in TEXTS]
        pages = [tuple(torch.full((sum(count), PAGE, *shape), torch.nan) for shape in layer) for layer in entries]
        tables = [list(range(count[0]))[::-1], [*range(count[0], sum(count)), *[0] * (count[0] - count[1])]]
        done, out = [0, 0], [[], []]
        for sizes in CHUNKS:
            tokens = [t for row, n in enumerate(sizes) for t in TEXTS[row][done[row] : done[row] + n]]
            positions = [done[row] + i for row, n in enumerate(sizes) for i in range(n)]
            starts = torch.tensor([0, sizes[0], sum(sizes)])
            groups = cached_groups(
                torch.tensor(tokens), torch.tensor(positions), starts, torch.tensor(tables), PAGE, padded
            )
            flat = torch.cat([x.flatten(0, 1) for x in self.run(groups, self.parts_in_check(), Ctx(), pages)])
            order = torch.cat([group.index.flatten() for group in groups]).argsort()
            for row, part in enumerate(flat[order].split(sizes)):
                out[row].append(part)
                done[row] += sizes[row]
        return [torch.cat(parts) for parts in out]

    def parts_in_check(self) -> Iterator[tuple[Block | None, Tree]]:
        """The parts of a pass with the random weights."""
        yield None, pytree.nest({leaf: self.outside[name] for name, leaf in self.places.items()})
        for number, (_, kind) in enumerate(self.copied.layers):
            run = lambda params, x, ctx, kind=kind: (first_of(self.call_layer(kind, ctx)),)  # noqa: E731
            yield run if self.runs_in_check(number) else lambda params, x, ctx: x, {}


def form_of(out: Any, leaves: list[Any]) -> Callable[[Tensor, list[Any]], Any]:
    """How a layer returns x: alone, or first in a tuple, beside arguments of its or nothing."""
    if not isinstance(out, (tuple, list)):
        return lambda x, leaves: x
    index = [next((i for i, leaf in enumerate(leaves) if leaf is extra), None) for extra in out[1:]]
    return lambda x, leaves: type(out)((x, *(None if i is None else leaves[i] for i in index)))


def logits_of(out: Any) -> Any:
    """The logits in what a module returns."""
    return getattr(out, "logits", out)

"""Pages of keys and values as numbers: who uses which, and which hold the keys and values of a prefix already.

A page holds those of `page_tokens` tokens. A full page is cached under a hash that is chained over the pages before it,
from a root on: the digest of all that changes a key or a value beside the tokens (model, adapter, dtype, kind of cache,
RoPE). A hash only finds a page: the tokens of the whole prefix are compared as well. A page that no sequence uses stays
cached until it is needed; the least recently used goes first.

Ref: Kwon et al. 2023, "Efficient memory management for large language model serving with PagedAttention",
arXiv:2309.06180, section 4; Zheng et al. 2023, "SGLang", arXiv:2312.07104, section 3 (least recently used prefixes).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V")
Ids = tuple[int, ...]
KEY_BITS, GROUP_BITS = 64, 8


def hash_ids(parent: int, ids: Ids) -> int:
    """The key of a page, in [0, 2^64): of the key of the page before it, and of its tokens."""
    data = parent.to_bytes(KEY_BITS // 8, "little") + array("q", ids).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=KEY_BITS // 8).digest(), "little")


class PersistentMap(Generic[V]):
    """An immutable mapping from whole numbers; a copy with changes shares what did not change.

    The keys are in dicts by their bits from `shift` on: a change copies one of these, not the whole.

    >>> old = PersistentMap(8)
    >>> new = old.edited({3: "a", 700: "b"})
    >>> old.get(3), new.get(3), [*new.edited({3: None}).values()]
    (None, 'a', ['b'])
    """

    __slots__ = ("_groups", "_shift")

    def __init__(self, shift: int, groups: Mapping[int, Mapping[int, V]] | None = None) -> None:
        self._shift, self._groups = shift, groups or {}

    def get(self, key: int) -> V | None:
        """The value of a key, or None."""
        group = self._groups.get(key >> self._shift)
        return None if group is None else group.get(key)

    def edited(self, changes: Mapping[int, V | None]) -> PersistentMap[V]:
        """The mapping with other values; None removes a key."""
        if not changes:
            return self
        copies: dict[int, dict[int, V]] = {}
        for key, value in changes.items():
            number = key >> self._shift
            if number not in copies:
                copies[number] = dict(self._groups.get(number, {}))
            if value is None:
                copies[number].pop(key, None)
            else:
                copies[number][key] = value
        groups = {**self._groups, **copies}
        for number in [number for number, group in copies.items() if not group]:
            del groups[number]
        return PersistentMap(self._shift, groups)

    def values(self) -> Iterator[V]:
        """The values, in the order of their keys."""
        for number in sorted(self._groups):
            group = self._groups[number]
            yield from [group[key] for key in sorted(group)]

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PersistentMap) and (self._shift, self._groups) == (other._shift, other._groups)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The first tokens of a sequence up to the end of a full page: those of the page, and the prefix before it.

    The prefix before all pages has the bytes of the root as its ids. Two are equal if all their ids are.
    """

    parent: Prefix | None
    key: int
    ids: Ids

    def __eq__(self, other: object) -> bool:
        """By a loop: sequences have thousands of pages."""
        if not isinstance(other, Prefix):
            return NotImplemented
        a, b = self, other
        while a is not b:
            if a is None or b is None or a.ids != b.ids:
                return False
            a, b = a.parent, b.parent
        return True

    def __hash__(self) -> int:
        return self.key

    def __repr__(self) -> str:
        return f"Prefix({self.key:016x}, {self.ids})"


class PageEntry(NamedTuple):
    """What is known of a page that was used."""

    count: int  # the sequences that use it
    prefix: Prefix | None = None  # where it is cached: whose keys and values it holds
    scored: bool = False  # whether the log-probs of its tokens, of a prompt, are stored beside it
    stamp: int = 0  # of a cached one that no sequence uses: when the last left it


class PagePool(NamedTuple):
    """The pages 0 .. size - 1, as a value: each method that changes something returns another pool.

    A page is used (count > 0), idle (cached, count 0), or empty; `available` counts the last two. A change takes time
    by what changes, and by the square root of `size`.

    >>> pool = empty_pool(4, page_tokens=2)
    >>> prefixes = pool.chain(pool.root_prefix(b"model"), (5, 6, 7, 8, 9))
    >>> pages, pool = pool.allocate(2)
    >>> pool = pool.register([(0, prefixes[0], False)]).release(pages)
    >>> pages, pool.match(prefixes, scored=False), pool.match(prefixes, scored=True), pool.available
    ((0, 1), (0,), (), 4)
    """

    size: int
    page_tokens: int
    hash_ids: Callable[[int, Ids], int]
    entries: PersistentMap[PageEntry]  # by page
    index: PersistentMap[int]  # by the key of its prefix, the page that is cached
    idle: PersistentMap[int]  # by stamp, the page
    empty: PersistentMap[int]  # by 0 .. returned - 1: pages that were used, and hold nothing
    returned: int = 0
    unused: int = 0  # pages from this one on were never used
    available: int = 0
    stamp: int = 0

    def root_prefix(self, root: bytes) -> Prefix:
        """The prefix before all pages. root: the digest of all that changes a key or a value beside the tokens."""
        ids = tuple(root)
        return Prefix(None, self.hash_ids(0, ids), ids)

    def chain(self, parent: Prefix, ids: Ids) -> tuple[Prefix, ...]:
        """The prefixes that end with each full page of `ids`, which follow on `parent`.

        Where one is cached, it is that object, so that comparing them takes no time.
        """
        prefixes, n = [], self.page_tokens
        for start in range(0, len(ids) - n + 1, n):
            page_ids = ids[start : start + n]
            key = self.hash_ids(parent.key, page_ids)
            cached = self._cached(key)
            if cached is None or cached.ids != page_ids or cached.parent != parent:
                cached = Prefix(parent, key, page_ids)
            parent = cached
            prefixes.append(parent)
        return tuple(prefixes)

    def match(self, prefixes: Iterable[Prefix], scored: bool) -> Ids:
        """The cached pages of the first of these prefixes, up to one that is not cached.

        scored: only pages beside which the log-probs of their tokens are stored.
        """
        pages, parent = [], None
        for prefix in prefixes:
            page = self.index.get(prefix.key)
            entry = None if page is None else self.entries.get(page)
            if page is None or entry is None or entry.prefix is None or (scored and not entry.scored):
                break
            cached = entry.prefix
            # `parent` is cached, and was compared with prefix.parent.
            if cached is not prefix and not (
                cached.ids == prefix.ids and (cached.parent is parent or cached.parent == prefix.parent)
            ):
                break
            pages.append(page)
            parent = cached
        return tuple(pages)

    def allocate(self, count: int) -> tuple[Ids, PagePool]:
        """So many pages, each with a count of 1, and the pool: empty ones, then the least recently used."""
        assert count <= self.available
        returned = max(self.returned - count, 0)
        pages: list[int] = [self._empty(i) for i in range(returned, self.returned)]
        unused = min(self.unused + count - len(pages), self.size)
        pages += range(self.unused, unused)
        evicted = [*islice(self.idle.values(), count - len(pages))]
        entries = [self.entry(page) for page in evicted]
        pages += evicted
        return tuple(pages), self._replace(
            entries=self.entries.edited(dict.fromkeys(pages, PageEntry(1))),
            index=self.index.edited({entry.prefix.key: None for entry in entries if entry.prefix}),
            idle=self.idle.edited({entry.stamp: None for entry in entries}),
            empty=self.empty.edited(dict.fromkeys(range(returned, self.returned))),
            returned=returned,
            unused=unused,
            available=self.available - count,
        )

    def share(self, pages: Iterable[int]) -> PagePool:
        """The pool after one more sequence uses these pages, which are cached."""
        entries = {page: self.entry(page) for page in pages}
        idle = {entry.stamp: None for entry in entries.values() if not entry.count}
        return self._replace(
            entries=self.entries.edited(
                {page: entry._replace(count=entry.count + 1) for page, entry in entries.items()}
            ),
            idle=self.idle.edited(idle),
            available=self.available - len(idle),
        )

    def release(self, pages: Ids) -> PagePool:
        """The pool after a sequence with this page table ended: of a prefix, its last page goes first."""
        entries: dict[int, PageEntry | None] = {}
        idle: dict[int, int | None] = {}
        empty: dict[int, int | None] = {}
        for page in reversed(pages):
            entry = self.entry(page)
            assert entry.count > 0
            if entry.count > 1:
                entries[page] = entry._replace(count=entry.count - 1)
            elif entry.prefix is None:
                entries[page] = None
                empty[self.returned + len(empty)] = page
            else:
                stamp = self.stamp + len(idle)
                entries[page] = entry._replace(count=0, stamp=stamp)
                idle[stamp] = page
        return self._replace(
            entries=self.entries.edited(entries),
            idle=self.idle.edited(idle),
            empty=self.empty.edited(empty),
            returned=self.returned + len(empty),
            available=self.available + len(empty) + len(idle),
            stamp=self.stamp + len(idle),
        )

    def register(self, full: Iterable[tuple[int, Prefix, bool]]) -> PagePool:
        """The pool after pages became full: (page, the prefix that ends with it, whether it is scored).

        Where the prefix is cached already, or another of its key, that page stays, unless this one is scored and that
        one is not.
        """
        entries: dict[int, PageEntry | None] = {}
        index: dict[int, int | None] = {}
        idle: dict[int, int | None] = {}
        empty: dict[int, int | None] = {}
        for page, prefix, scored in full:
            previous = index.get(prefix.key, self.index.get(prefix.key))
            if previous is not None:
                entry = entries.get(previous) or self.entry(previous)
                if not scored or entry.scored or entry.prefix != prefix:
                    continue
                entries[previous] = PageEntry(entry.count) if entry.count else None
                if not entry.count:
                    idle[entry.stamp] = None
                    empty[self.returned + len(empty)] = previous
            entries[page] = PageEntry(self.entry(page).count, prefix, scored)
            index[prefix.key] = page
        return self._replace(
            entries=self.entries.edited(entries),
            index=self.index.edited(index),
            idle=self.idle.edited(idle),
            empty=self.empty.edited(empty),
            returned=self.returned + len(empty),
        )

    def entry(self, page: int) -> PageEntry:
        """What is known of a page that was used."""
        entry = self.entries.get(page)
        assert entry is not None, page
        return entry

    def idle_count(self, pages: Iterable[int]) -> int:
        """How many of these cached pages no sequence uses."""
        return sum(not self.entry(page).count for page in pages)

    def _cached(self, key: int) -> Prefix | None:
        page = self.index.get(key)
        return None if page is None else self.entry(page).prefix

    def _empty(self, number: int) -> int:
        page = self.empty.get(number)
        assert page is not None
        return page


def empty_pool(size: int, page_tokens: int, hash_ids: Callable[[int, Ids], int] = hash_ids) -> PagePool:
    """A pool whose pages hold nothing. hash_ids: from the key of a page and the tokens of the next, its key."""
    entries, index = PersistentMap[PageEntry](GROUP_BITS), PersistentMap[int](KEY_BITS - GROUP_BITS)
    numbers = PersistentMap[int](GROUP_BITS)
    return PagePool(size, page_tokens, hash_ids, entries, index, idle=numbers, empty=numbers, available=size)

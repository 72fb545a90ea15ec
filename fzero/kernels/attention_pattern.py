"""Which keys a query of causal attention sees: the pattern, and documents packed in one row."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

LONGEST = 10**9  # tokens


@dataclass(frozen=True)
class Pattern:
    """An attention pattern: which earlier positions a query sees. "full": all; the others have `size` and `keep` in
    tokens.

    window: the last `size`, itself among them (Beltagy et al. 2020). local: those in its own block of `size`. strided:
    the last `size`, and each `size`-th before. fixed: those in its own block of `size`, and the last `keep` of every
    block (Child et al. 2019, "Generating long sequences with sparse transformers", section 4.2-4.3).
    """

    kind: str = "full"
    size: int = 0
    keep: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("full", "window", "local", "strided", "fixed"):
            raise ValueError(f"attention pattern {self.kind!r} is unknown; use full, window, local, strided or fixed")
        if self.kind != "full" and self.size < 1:
            raise ValueError(f"attention pattern {self.kind}: size is {self.size}; it must be at least 1")
        if self.size > LONGEST:
            raise ValueError(f"attention pattern {self.kind}: size is {self.size}; it must be at most {LONGEST:,}")
        if self.kind == "fixed" and not 1 <= self.keep <= self.size:
            raise ValueError(f"attention pattern fixed: keep is {self.keep}; it must be in [1, size = {self.size}]")

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """The pattern of a text: "full", "window:SIZE", "local:SIZE", "strided:SIZE" or "fixed:SIZE:KEEP"."""
        form = re.fullmatch(r"(\w+)(?::(\d+))?(?::(\d+))?", text)
        if form is None:
            raise ValueError(f"attention pattern {text!r} is not of the form full, window:SIZE or fixed:SIZE:KEEP")
        return cls(form[1], int(form[2] or 0), int(form[3] or 0))

    def __str__(self) -> str:
        """The text that `parse` takes."""
        return ":".join(str(part) for part in (self.kind, self.size, self.keep) if part)

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether the query at position `query` sees the key at position `key` (broadcast; causality included)."""
        causal, distance = key <= query, query - key
        if self.kind == "window":
            return causal & (distance < self.size)
        if self.kind == "local":
            return causal & (query // self.size == key // self.size)
        if self.kind == "strided":
            return causal & ((distance < self.size) | (distance % self.size == 0))
        if self.kind == "fixed":
            return causal & ((query // self.size == key // self.size) | (key % self.size >= self.size - self.keep))
        return causal

    def first_key(self, query: int) -> int:
        """The first key that any query at position `query` or later sees."""
        if self.kind == "window":
            return max(0, query - self.size + 1)
        return query // self.size * self.size if self.kind == "local" else 0

    def keys_seen(self, query: int, end: int) -> int:
        """The number of keys before position `end` that the query at position `query` sees."""
        end = min(end, query + 1)
        if self.kind == "full":
            return end
        size = self.size
        own = (
            query // size * size if self.kind in ("local", "fixed") else max(0, query - size + 1)
        )  # where the near keys begin
        near, earlier = max(0, end - own), min(end, own)
        if self.kind == "strided":
            return near + max(0, earlier - query % size + size - 1) // size
        if self.kind == "fixed":
            return near + earlier // size * self.keep + max(0, earlier % size - (size - self.keep))
        return near


FULL = Pattern()


def visible_mask(pattern: Pattern, query: Tensor, key: Tensor, documents: Tensor | None) -> Tensor:
    """The mask (bool [1 or B, len(query), len(key)]) of the positions `query` and `key` (int64 vectors).

    documents: int [B, S], the document of each of the S positions, or None.
    """
    mask = pattern.sees(query[:, None], key[None, :])[None]
    if documents is None:
        return mask
    return mask & (documents[:, query, None] == documents[:, None, key])

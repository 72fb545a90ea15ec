"""Offload: the memory that each group of a state rests in: on the device, in the host's memory, or on a disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fzero.core.pytree import nearest
from fzero.sharding.spec import MEMORIES

GROUPS = {
    "params": "the parameters that the model computes with",
    "grads": "the sums of the gradients of a step",
    "opt": "master weights, optimizer state and average",
    "acts": "the activations that a remat policy keeps",
}


@dataclass(frozen=True)
class Tier:
    """A memory, and the fraction of a group's bytes, in whole leaves, that rests in it.

    The other leaves stay on the device.
    """

    memory: str = "device"
    fraction: float = 1.0

    def __str__(self) -> str:
        return self.memory + (f":{self.fraction:g}" if self.fraction < 1.0 else "")


@dataclass(frozen=True)
class Offload:
    """A Tier for each group. `str` gives the text that `parse` reads."""

    params: Tier = Tier()
    grads: Tier = Tier()
    opt: Tier = Tier()
    acts: Tier = Tier()

    @classmethod
    def parse(cls, text: str) -> Offload:
        """The Offload of a text such as "params=nvme,acts=host" or "opt=host:0.5" (half of the bytes).

        "" leaves all on the device.
        """
        tiers: dict[str, Tier] = {}
        for entry in filter(None, text.replace(" ", "").split(",")):
            group, equals, tier_text = entry.partition("=")
            memory, colon, fraction = tier_text.partition(":")
            if group not in GROUPS or not equals:
                raise ValueError(
                    f"offload {text!r}: {group!r} is not a group{nearest(group, GROUPS)}; "
                    f"use {', '.join(GROUPS)}, as in params=nvme,opt=nvme"
                )
            if memory not in MEMORIES:
                raise ValueError(
                    f"offload {text!r}: {memory!r} is not a memory{nearest(memory, MEMORIES)}; use "
                    f"{', '.join(MEMORIES)}"
                )
            if group in tiers:
                raise ValueError(f"offload {text!r}: {group} is given twice")
            try:
                share = float(fraction) if colon else 1.0
            except ValueError:
                share = -1.0
            if memory == "device" and colon:
                raise ValueError(f"offload {text!r}: {group}=device has no fraction; give that of host or nvme")
            if not 0.0 < share <= 1.0 or (group == "acts" and share < 1.0):
                raise ValueError(
                    f"offload {text!r}: the fraction {fraction!r} of {group} must be above 0 and at most 1 "
                    "(acts: all of them)"
                )
            tiers[group] = Tier(memory, share)
        return cls(**tiers)

    @property
    def memories(self) -> set[str]:
        """The memories in use."""
        return {tier.memory for tier in (self.params, self.grads, self.opt, self.acts)}

    def __str__(self) -> str:
        tiers = {group: getattr(self, group) for group in GROUPS}
        return ",".join(f"{group}={tier}" for group, tier in tiers.items() if tier.memory != "device")


ALL_ON_DEVICE = Offload()


def select_largest(sizes: Mapping[str, int], fraction: float) -> set[str]:
    """The names of the largest leaves that together hold at least `fraction` of all bytes. sizes: {name: bytes}."""
    names, selected_bytes, total = set(), 0, sum(sizes.values())
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if selected_bytes >= fraction * total:
            break
        names.add(name)
        selected_bytes += sizes[name]
    return names

"""A mesh in a line of text. It imports no torch, so what only shows a mesh need not either."""

from __future__ import annotations

from collections.abc import Mapping


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Format the sizes of a mesh, without axes of one rank.

    >>> mesh_text({"dp": 8, "tp": 2, "pp": 1}), mesh_text({"dp": 1}), mesh_text({})
    ('dp=8 tp=2', 'one process', 'one process')
    """
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one process"

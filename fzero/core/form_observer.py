"""Which form each hot operation takes (kernels/registry.py), for whoever wants to know."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

_OBSERVERS: list[dict[str, set[str]]] = []


@contextlib.contextmanager
def observe() -> Iterator[dict[str, set[str]]]:
    """A context that records the names of the forms each operation takes, in the dict it yields."""
    used: dict[str, set[str]] = {}
    _OBSERVERS.append(used)
    try:
        yield used
    finally:
        _OBSERVERS[:] = [observer for observer in _OBSERVERS if observer is not used]


def note(operation: str, form: str) -> None:
    """Tell all observers that an operation takes a form."""
    for used in _OBSERVERS:
        used.setdefault(operation, set()).add(form)


def note_all(forms: Mapping[str, Iterable[str]]) -> None:
    """Tell all observers of the forms of several operations, such as a kept program's."""
    for operation, names in forms.items():
        for name in names:
            note(operation, name)

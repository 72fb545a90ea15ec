"""Which cases of a test with many run every time, and which are slow.

`@pytest.mark.each_pair` above stacked parametrizations keeps, of all their combinations, cases in which every pair of
values of two arguments occurs; `@pytest.mark.each_value` keeps cases in which every value occurs. The other cases are
marked slow."""

import itertools
from collections import defaultdict

import pytest


def key_of(value):
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value


def parts_of(params, strength):
    """What one case covers: its values (strength 1) or its pairs of values (2), each with the names of the
    arguments."""
    named = [(name, key_of(params[name])) for name in sorted(params)]
    return set(itertools.combinations(named, min(strength, len(named))))


def chosen(cases, strength):
    """Indices of few cases that cover what all of `cases` (dicts of values by argument) cover; the earliest among
    equals."""
    parts = [parts_of(params, strength) for params in cases]
    left, taken = set().union(*parts), set()
    while left:
        best = max(range(len(cases)), key=lambda i: (len(parts[i] & left), -i))
        taken.add(best)
        left -= parts[best]
    return taken


def mark(items):
    """Add the marker `slow` to the cases that are not chosen of every test marked each_value or each_pair."""
    groups = defaultdict(list)
    for item in items:
        strength = 2 if item.get_closest_marker("each_pair") else 1 if item.get_closest_marker("each_value") else 0
        if strength and hasattr(item, "callspec") and not item.get_closest_marker("exhaustive"):
            groups[item.path, item.originalname, strength].append(item)
    for (_, _, strength), group in groups.items():
        taken = chosen([item.callspec.params for item in group], strength)
        for i, item in enumerate(group):
            if i not in taken and not item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.slow)

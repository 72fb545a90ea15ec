"""The cases that run every time: few, and every value or every pair of values is among them."""

import itertools
from types import SimpleNamespace

import pytest
import tiers

VALUES = {"a": [0, 1, 2], "b": ["x", "y"], "c": [True, False, None], "d": [[], [1]]}
CASES = [dict(zip(VALUES, values)) for values in itertools.product(*VALUES.values())]


@pytest.mark.parametrize(("strength", "at_most"), [(1, 3), (2, 11)])
def test_few_cases_cover_all(strength, at_most):
    taken = tiers.chosen(CASES, strength)
    covered = set().union(*(tiers.parts_of(CASES[i], strength) for i in taken))
    assert covered == set().union(*(tiers.parts_of(case, strength) for case in CASES))
    assert max(3, strength * 3) <= len(taken) <= at_most


def test_values_that_are_equal_and_of_two_types_are_two():
    assert len(tiers.chosen([{"a": 1}, {"a": True}, {"a": 1.0}, {"a": 1}], 1)) == 3


class Item(SimpleNamespace):
    def get_closest_marker(self, name):
        return name if name in self.marks else None

    def add_marker(self, mark):
        self.marks.append(mark.name)


@pytest.mark.parametrize(
    ("marks", "every"), [([], 9), (["each_value"], 3), (["each_pair"], 9), (["each_value", "exhaustive"], 9)]
)
def test_the_others_are_marked(marks, every):
    items = [
        Item(path="test_a.py", originalname="test", callspec=SimpleNamespace(params={"a": a, "b": b}), marks=[*marks])
        for a, b in itertools.product("xyz", "uvw")
    ]
    tiers.mark(items)
    assert sum("slow" not in item.marks for item in items) == every

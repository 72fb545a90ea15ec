"""The bytes of plans and the communication of a step are those of tests/goldens/plans.json, to the byte.

`python tests/goldens/make.py` writes that file anew, where a change is meant to move them.
"""

import json

import pytest
from goldens.make import CASES, PLANS, golden


@pytest.fixture(scope="module")
def expected():
    return json.loads(PLANS.read_text())


def test_the_file_has_these_cases(expected):
    assert list(expected) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_no_byte_moved(expected, name):
    assert golden(CASES[name]) == expected[name]

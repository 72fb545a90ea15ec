"""Plans on a GPU have the same bytes with every version of PyTorch, with compiled blocks too.

`python tests/goldens/make_h100.py` writes tests/goldens/h100.json anew, with any version, where a change is meant to
move them.
"""

import json

import pytest
from goldens import make_h100

OFTEN = ("llama-8b, loss in chunks", "llama-8b, all host")


@pytest.fixture(scope="module")
def expected():
    return json.loads(make_h100.H100.read_text())


def test_the_file_has_these_cases(expected):
    assert list(expected) == list(make_h100.CASES)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in OFTEN)) for name in make_h100.CASES]
)
def test_no_byte_depends_on_the_version(name, expected):
    found, wanted = make_h100.golden(make_h100.CASES[name]), dict(expected[name])
    # Seconds may: what Inductor fuses of a router does, by 4e-5 of a step.
    assert found.pop("step_s") == pytest.approx(wanted.pop("step_s"), rel=1e-3)
    assert found == wanted

"""The bytes of plans and the communication of a step are those of tests/goldens/plans.json, to the byte.

`python tests/goldens/make.py` writes that file anew, and make_gpu.py that of
plans on GPUs, where a change is meant to move them.
"""

import json

import pytest
import torch
from goldens import make_gpu
from goldens.make import CASES, PLANS, golden


@pytest.fixture(scope="module")
def expected():
    return json.loads(PLANS.read_text())


def test_the_file_has_these_cases(expected):
    assert list(expected) == list(CASES)


# Every model, dtype, mesh, stage and kind of offload.
OFTEN = ("one", "dp4 stage 2", "dp2 stage 3 lamb", "dp2 stage 0 canonical", "tp2 sequence", "dp2 tp2 stage 1 mixtral",
         "rp2 dp2 stage 3", "dp2 stage 3 host", "dp2 stage 3 whole", "dp2 stage 3 nvme")  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in OFTEN)) for n in CASES])
def test_no_byte_moved(expected, name):
    assert golden(CASES[name]) == expected[name]


@pytest.mark.exhaustive  # minutes; plans of few layers are in test_plan_versions.py
@pytest.mark.parametrize("name", make_gpu.CASES)
def test_no_plan_of_a_gpu_moved(name):
    table = json.loads(make_gpu.GPU.read_text())
    expected, found = table[name], make_gpu.golden(make_gpu.CASES[name])
    same = torch.__version__.startswith(f"{table['torch']}.")
    for figure in make_gpu.VERSIONED:
        value = expected.pop(figure)
        assert found.pop(figure) == (value if same else pytest.approx(value, rel=0.05)), figure
    assert found == expected


def test_the_file_has_the_plans_of_gpus():
    assert list(json.loads(make_gpu.GPU.read_text())) == ["torch", *make_gpu.CASES]

"""Offload on a mesh with pp has the bits of the same run without: what each stage keeps rests elsewhere, the leaves
that stages share with it, and the activations of several micro-batches at a time. A store is one of its pipeline."""

import itertools

import pytest
from test_offload import Case, check, each, folder  # noqa: F401  (a fixture)

from fzero.sharding.pipelines import Pipeline

PP2, PP2_DP2 = (("pp", 2),), (("pp", 2), ("dp", 2))
ALL = "params=nvme,grads=nvme,opt=nvme,acts=nvme"
FEW = Case(ALL, 3, PP2, micro=3, steps=5, model="tied and deep", remat="full", pipeline=Pipeline())
INTERLEAVED = Pipeline("interleaved", chunks=2)


@each([FEW._replace(stage=0, pipeline=Pipeline(layout="1,3")), FEW._replace(micro=4, pipeline=INTERLEAVED)])
def test_a_pipeline_with_everything_on_a_disk_has_the_same_bits(case, folder):  # noqa: F811
    check(case, folder)


TIERS = ("opt=nvme", "params=nvme,opt=nvme", "acts=nvme", "grads=nvme", "params=host,grads=host,opt=host,acts=host")


@pytest.mark.exhaustive
@each(
    [
        FEW._replace(offload=offload, stage=stage, mesh=mesh, policy=policy, micro=4, pipeline=pipeline)
        for offload, stage, (mesh, policy, pipeline) in itertools.product(
            TIERS,
            range(4),
            (
                (PP2, "fp32", INTERLEAVED),
                (PP2, "bf16", Pipeline(layout="3,1")),
                (PP2_DP2, "fp32", Pipeline()),
                (PP2_DP2, "bf16", Pipeline("gpipe", layout="1,3")),
            ),
        )
    ]
)
def test_every_tier_has_the_same_bits(case, folder):  # noqa: F811
    check(case, folder)

"""Where every leaf lives: meshes, specs, rules and plans as values."""

from fzero.comm.collectives import Axis
from fzero.sharding.codec import Codec
from fzero.sharding.context import Context
from fzero.sharding.experts import Experts
from fzero.sharding.mesh import AXES, Mesh, fake_mesh, make_mesh, one_process
from fzero.sharding.pipeline_plan import Pipeline
from fzero.sharding.plan import LeafPlan, Plan, zero_plan
from fzero.sharding.redistribute import from_dtensor, redistribute, to_dtensor
from fzero.sharding.rules import Rules, match_rules
from fzero.sharding.slices import local_shape, narrow_to
from fzero.sharding.spec import Spec
from fzero.sharding.zero_specs import ZERO

__all__ = [
    "AXES",
    "ZERO",
    "Axis",
    "Codec",
    "Context",
    "Experts",
    "LeafPlan",
    "Mesh",
    "Pipeline",
    "Plan",
    "Rules",
    "Spec",
    "fake_mesh",
    "from_dtensor",
    "local_shape",
    "make_mesh",
    "match_rules",
    "narrow_to",
    "one_process",
    "redistribute",
    "to_dtensor",
    "zero_plan",
]

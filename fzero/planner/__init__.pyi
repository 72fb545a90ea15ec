"""For contributors: what the other packages of fzero use."""

# Modules
from fzero.planner import closed_forms as closed_forms
from fzero.planner import devices as devices
from fzero.planner import fake_inductor as fake_inductor
from fzero.planner import launch as launch
from fzero.planner import plan as plan
from fzero.planner import plan_report as plan_report
from fzero.planner import search as search
from fzero.planner import search_result as search_result

# Modules
from fzero.planner.calibrate import disk as disk
from fzero.planner.calibrate import machine as machine

# Closed forms of a candidate's memory and time
from fzero.planner.closed_forms import first_estimate as first_estimate

# Generation before it runs
from fzero.planner.generation import Workload as Workload
from fzero.planner.generation import plan_generation as plan_generation
from fzero.planner.generation import serve as serve

# The longest sequence that a model trains on one device
from fzero.planner.max_sequence import longest as longest

# The report of a plan with pp
from fzero.planner.pipeline_report import with_layout as with_layout

# Predict a run before it runs
from fzero.planner.plan import device_for as device_for
from fzero.planner.plan import resolve_for as resolve_for

# The report of a plan
from fzero.planner.plan_report import PlanReport as PlanReport

# What would help a run whose nodes have slow links between them
from fzero.planner.slow_link_options import fewer_bytes as fewer_bytes

# The trace of a deep model from a step that runs only a few of its layers
from fzero.planner.trace_cache import cache_folder as cache_folder
from fzero.planner.trace_cache import is_cached as is_cached

"""For contributors: what the other packages of fzero use."""

# Modules
from fzero.run.config import config_table as config_table
from fzero.run.config import curriculum as curriculum
from fzero.run.config import transforms as transforms
from fzero.run.config import unused_keys as unused_keys

# Checks of a config
from fzero.run.config.config_checks import expect_fitting_corpus as expect_fitting_corpus
from fzero.run.config.config_checks import expect_loggers as expect_loggers
from fzero.run.config.config_checks import expect_rows as expect_rows

# A config as a nested table, and as JSON text
from fzero.run.config.config_table import SMALL_RUNS as SMALL_RUNS
from fzero.run.config.config_table import apply_table as apply_table
from fzero.run.config.config_table import from_json as from_json
from fzero.run.config.config_table import from_table as from_table
from fzero.run.config.config_table import recipe as recipe
from fzero.run.config.config_table import to_json as to_json
from fzero.run.config.config_table import to_table as to_table

# A config as a nested table, and as JSON text
from fzero.run.config.config_versions import current_keys as current_keys

# The curriculum of a run
from fzero.run.config.curriculum import BUCKETS as BUCKETS
from fzero.run.config.curriculum import BucketStep as BucketStep
from fzero.run.config.curriculum import curriculum_of as curriculum_of
from fzero.run.config.curriculum import lengths_of as lengths_of
from fzero.run.config.curriculum import make_pieces as make_pieces
from fzero.run.config.curriculum import with_scale as with_scale

# A DeepSpeed config as a config of a run
from fzero.run.config.deepspeed import merge_tables as merge_tables
from fzero.run.config.deepspeed import read_deepspeed as read_deepspeed

# The objectives of a run as values
from fzero.run.config.objectives import Lines as Lines
from fzero.run.config.objectives import fine_tuning_presets as fine_tuning_presets
from fzero.run.config.objectives import objective_named as objective_named
from fzero.run.config.objectives import objective_of as objective_of
from fzero.run.config.objectives import unit_of as unit_of

# The placement of a run
from fzero.run.config.placement import CORPUS as CORPUS
from fzero.run.config.placement import FLAGS as FLAGS
from fzero.run.config.placement import KEYS as KEYS
from fzero.run.config.placement import WHOLE as WHOLE
from fzero.run.config.placement import Copy as Copy
from fzero.run.config.placement import copies as copies
from fzero.run.config.placement import expect_corpus as expect_corpus
from fzero.run.config.placement import expect_recorded as expect_recorded
from fzero.run.config.placement import fit_layout as fit_layout
from fzero.run.config.placement import keep_placement as keep_placement
from fzero.run.config.placement import may_change as may_change
from fzero.run.config.placement import resume_command as resume_command
from fzero.run.config.placement import split_values as split_values
from fzero.run.config.placement import with_values as with_values

# The configuration of a run as a value
from fzero.run.config.run_config import Data as Data
from fzero.run.config.run_config import Guard as Guard
from fzero.run.config.run_config import LocalSteps as LocalSteps
from fzero.run.config.run_config import Optim as Optim
from fzero.run.config.run_config import RunConfig as RunConfig

# Stages of a run
from fzero.run.config.stages import STAGED as STAGED
from fzero.run.config.stages import change_stage as change_stage
from fzero.run.config.stages import count_samples as count_samples
from fzero.run.config.stages import count_tokens as count_tokens
from fzero.run.config.stages import shared_batch as shared_batch
from fzero.run.config.stages import split_changes as split_changes
from fzero.run.config.stages import stage_of_step as stage_of_step
from fzero.run.config.stages import staged as staged
from fzero.run.config.stages import stages_of as stages_of
from fzero.run.config.stages import token_rates as token_rates

# What a run does to the rows that it reads before they are used
from fzero.run.config.transforms import make_transforms as make_transforms

# What a field of a config says of its key, besides its bounds
from fzero.run.config.unused_keys import OUTER as OUTER
from fzero.run.config.unused_keys import SEND_SIGNS as SEND_SIGNS
from fzero.run.config.unused_keys import SIGNS as SIGNS
from fzero.run.config.unused_keys import codec_of as codec_of
from fzero.run.config.unused_keys import count_sums as count_sums
from fzero.run.config.unused_keys import drop_absent_axes as drop_absent_axes
from fzero.run.config.unused_keys import first_local as first_local
from fzero.run.config.unused_keys import refuse_without_axis as refuse_without_axis

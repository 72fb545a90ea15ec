from fzero.sharding.pipeline.check import Played as Played
from fzero.sharding.pipeline.check import check as check
from fzero.sharding.pipeline.check import count_gathers as count_gathers
from fzero.sharding.pipeline.check import play as play
from fzero.sharding.pipeline.check import with_gathers as with_gathers
from fzero.sharding.pipeline.check import with_updates as with_updates
from fzero.sharding.pipeline.orders import FAMILIES as FAMILIES
from fzero.sharding.pipeline.orders import schedule as schedule
from fzero.sharding.pipeline.stages import layout as layout
from fzero.sharding.pipeline.stages import read_layout as read_layout
from fzero.sharding.pipeline.stages import read_schedule as read_schedule
from fzero.sharding.pipeline.stages import split_layers as split_layers
from fzero.sharding.pipeline.stages import stage_ranks as stage_ranks
from fzero.sharding.pipeline.stages import write_schedule as write_schedule
from fzero.sharding.pipeline.table import Act as Act
from fzero.sharding.pipeline.table import Schedule as Schedule
from fzero.sharding.pipeline.table import Stages as Stages
from fzero.sharding.pipeline.table import feeds as feeds
from fzero.sharding.pipeline.table import needs as needs

"""For contributors: what the other packages of fzero use."""

# Whether a schedule is one
from fzero.sharding.pipeline.check import gather_row as gather_row

# A schedule in time
from fzero.sharding.pipeline.check import peak as peak

# The order in which one rank works, by family of schedules
from fzero.sharding.pipeline.orders import group_size as group_size

# What a schedule is
from fzero.sharding.pipeline.table import BACKWARD as BACKWARD
from fzero.sharding.pipeline.table import KINDS as KINDS
from fzero.sharding.pipeline.table import simulate as simulate

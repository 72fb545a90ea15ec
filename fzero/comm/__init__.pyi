"""For contributors: what the other packages of fzero use."""

# The parallel axes of a mesh
# Collectives as linear maps
from fzero.comm.axes import AXES as AXES
from fzero.comm.axes import CP as CP
from fzero.comm.axes import DP as DP
from fzero.comm.axes import EP as EP
from fzero.comm.axes import PP as PP
from fzero.comm.axes import RP as RP
from fzero.comm.axes import TP as TP
from fzero.comm.axes import expect_mesh as expect_mesh
from fzero.comm.axes import joined_links as joined_links
from fzero.comm.axes import links_of as links_of
from fzero.comm.axes import mesh_text as mesh_text
from fzero.comm.collectives import all_gather as all_gather
from fzero.comm.collectives import all_gather_same as all_gather_same
from fzero.comm.collectives import all_to_all as all_to_all
from fzero.comm.collectives import own_slice as own_slice
from fzero.comm.collectives import ppermute as ppermute
from fzero.comm.collectives import psum as psum
from fzero.comm.collectives import psum_scatter as psum_scatter
from fzero.comm.collectives import pvary as pvary
from fzero.comm.collectives import start_all_gather as start_all_gather
from fzero.comm.collectives import start_all_to_all as start_all_to_all
from fzero.comm.collectives import start_psum as start_psum
from fzero.comm.collectives import start_psum_scatter as start_psum_scatter

# Communicator
from fzero.comm.communicator import ONE_SIDED as ONE_SIDED
from fzero.comm.communicator import SMALL_BYTES as SMALL_BYTES
from fzero.comm.communicator import Axis as Axis
from fzero.comm.communicator import Communicator as Communicator
from fzero.comm.communicator import communicator_of as communicator_of

# The ledger
from fzero.comm.ledger import ActTimes as ActTimes
from fzero.comm.ledger import Ledger as Ledger
from fzero.comm.ledger import LedgerRow as LedgerRow
from fzero.comm.ledger import sent_elements as sent_elements
from fzero.comm.messages import SMALL as SMALL

# Messages between this process and the other ranks of one mesh axis
from fzero.comm.messages import CollectiveCall as CollectiveCall
from fzero.comm.messages import ProgramAgreement as ProgramAgreement
from fzero.comm.messages import RankError as RankError
from fzero.comm.messages import bucket_groups as bucket_groups
from fzero.comm.messages import pack as pack
from fzero.comm.messages import padded as padded
from fzero.comm.messages import unpack as unpack

# The collectives as torch operators, which a traced graph has in program order
from fzero.comm.operators import define_ordered as define_ordered

# Exchanges beside `all_to_all`
from fzero.comm.rank_tables import Receiver as Receiver

# Small tables that all ranks fill together
from fzero.comm.rank_tables import Refusal as Refusal
from fzero.comm.rank_tables import Sender as Sender
from fzero.comm.rank_tables import TreeLayout as TreeLayout
from fzero.comm.rank_tables import any_rank as any_rank
from fzero.comm.rank_tables import barrier as barrier
from fzero.comm.rank_tables import device_of as device_of
from fzero.comm.rank_tables import exchange_within as exchange_within
from fzero.comm.rank_tables import failing_together as failing_together
from fzero.comm.rank_tables import gather_rows as gather_rows
from fzero.comm.rank_tables import open_channels as open_channels
from fzero.comm.rank_tables import packed as packed
from fzero.comm.rank_tables import raise_local as raise_local
from fzero.comm.rank_tables import raise_together as raise_together
from fzero.comm.rank_tables import start_exchange_rows as start_exchange_rows
from fzero.comm.rank_tables import sum_rows as sum_rows

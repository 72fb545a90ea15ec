from fzero.core.form_observer import observe as observe
from fzero.kernels.registry import Form as Form
from fzero.kernels.registry import explain as explain

"""For contributors: what the other packages of fzero use."""

# Modules
from fzero.kernels import aot as aot
from fzero.kernels import attention as attention
from fzero.kernels import attention_arguments as attention_arguments
from fzero.kernels import block_mask as block_mask
from fzero.kernels import cross_entropy_triton as cross_entropy_triton
from fzero.kernels import dropout as dropout
from fzero.kernels import float8 as float8
from fzero.kernels import grad_norm as grad_norm
from fzero.kernels import linear as linear
from fzero.kernels import linear_cross_entropy as linear_cross_entropy
from fzero.kernels import moe as moe
from fzero.kernels import newton_schulz as newton_schulz
from fzero.kernels import norm_triton as norm_triton
from fzero.kernels import optim_lowbit as optim_lowbit
from fzero.kernels import paged_attention as paged_attention
from fzero.kernels import quantize as quantize
from fzero.kernels import quantize_codes as quantize_codes
from fzero.kernels import quantized_linear as quantized_linear
from fzero.kernels import rowwise as rowwise
from fzero.kernels import tuning as tuning

# Codes in pages of keys and values
from fzero.kernels.attention_arguments import PAGE_CODES as PAGE_CODES

# What every form of attention shares
from fzero.kernels.attention_arguments import Positions as Positions
from fzero.kernels.attention_arguments import Scoring as Scoring

# Which keys a query of causal attention sees
from fzero.kernels.attention_pattern import BACKWARD_PRODUCTS as BACKWARD_PRODUCTS
from fzero.kernels.attention_pattern import FORWARD_PRODUCTS as FORWARD_PRODUCTS
from fzero.kernels.attention_pattern import FULL as FULL
from fzero.kernels.attention_pattern import SPLIT_PRODUCTS as SPLIT_PRODUCTS
from fzero.kernels.attention_pattern import Pattern as Pattern
from fzero.kernels.attention_pattern import pairs as pairs
from fzero.kernels.attention_pattern import pairs_by_query as pairs_by_query

# Attention by parts of one softmax
from fzero.kernels.attention_ring import ChunkAttention as ChunkAttention
from fzero.kernels.attention_ring import join as join
from fzero.kernels.attention_ring import ring_attention as ring_attention

# Attention by blocks of queries, for CPUs
from fzero.kernels.attention_tiled import MAX_BLOCKS as MAX_BLOCKS
from fzero.kernels.attention_tiled import MIN_BLOCK as MIN_BLOCK

# Which blocks of keys each block of queries sees, head by head
from fzero.kernels.block_mask import BlockMask as BlockMask

# Cross entropy of given logits
from fzero.kernels.cross_entropy import check_targets as check_targets
from fzero.kernels.cross_entropy import counted_tokens as counted_tokens

# Rows of logits, as the loss of cross_entropy needs them
from fzero.kernels.cross_entropy import is_tracing as is_tracing
from fzero.kernels.cross_entropy import number_of as number_of
from fzero.kernels.cross_entropy import weighed as weighed

# What files of kernels are made with
from fzero.kernels.custom_operator import INSTALLED as INSTALLED
from fzero.kernels.custom_operator import MISSING as MISSING
from fzero.kernels.custom_operator import OPENED as OPENED
from fzero.kernels.custom_operator import Fused as Fused
from fzero.kernels.custom_operator import cap_logits as cap_logits
from fzero.kernels.custom_operator import operator as operator
from fzero.kernels.custom_operator import triton as triton

# Rows of a table by their numbers, whose gradient is summed over tokens in float32 or wider
from fzero.kernels.embedding import look_up as look_up

# Linear in float8
from fzero.kernels.float8 import least_capability as least_capability

# Weights on their way between ranks as float8
from fzero.kernels.float8_gather import narrow_weight as narrow_weight
from fzero.kernels.float8_gather import widen_weight as widen_weight

# Gated activations
from fzero.kernels.glu import clamped_swiglu as clamped_swiglu
from fzero.kernels.glu import geglu as geglu
from fzero.kernels.glu import swiglu as swiglu

# Linear layer and cross entropy in one operation that never holds all logits
from fzero.kernels.linear_cross_entropy import chunk_rows as chunk_rows
from fzero.kernels.linear_cross_entropy import column_range as column_range
from fzero.kernels.linear_cross_entropy import token_losses as token_losses

# Mixture of experts
from fzero.kernels.moe import grouped_mm as grouped_mm

# Rows of tokens to their experts and back, for a mixture of experts
from fzero.kernels.moe_permute import permute as permute
from fzero.kernels.moe_permute import unpermute as unpermute

# Where the tokens of a mixture of experts go
from fzero.kernels.moe_routing import group as group

# The approximate orthogonal (polar) factor of a matrix by Newton-Schulz iterations, for Muon
from fzero.kernels.newton_schulz import COEFFICIENTS as COEFFICIENTS

# RMSNorm and LayerNorm over the last dim, alone or after a residual sum
from fzero.kernels.norm import add_layer_norm as add_layer_norm
from fzero.kernels.norm import add_rms_norm as add_rms_norm
from fzero.kernels.norm import layer_norm as layer_norm
from fzero.kernels.norm import rms_norm as rms_norm

# One step of AdamW or Lion on a leaf
from fzero.kernels.optim_leaf import MANY as MANY
from fzero.kernels.optim_leaf import PIECE as PIECE
from fzero.kernels.optim_leaf import PIECE_ELSEWHERE as PIECE_ELSEWHERE
from fzero.kernels.optim_leaf import OptimLeaf as OptimLeaf
from fzero.kernels.optim_leaf import StepRates as StepRates
from fzero.kernels.optim_leaf import adamw_step as adamw_step
from fzero.kernels.optim_leaf import lion_step as lion_step
from fzero.kernels.optim_leaf import safe_sqrt as safe_sqrt
from fzero.kernels.optim_leaf import step_leaf as step_leaf

# Optimizer state in 16 and 8 bits
from fzero.kernels.optim_lowbit import blocks_of as blocks_of
from fzero.kernels.optim_lowbit import decode as decode
from fzero.kernels.optim_lowbit import encode as encode

# AdamW and Lion over many leaves in one launch, in place
from fzero.kernels.optim_multi_tensor import adamw as adamw
from fzero.kernels.optim_multi_tensor import lion as lion

# Block quantisation
from fzero.kernels.quantize import dequantize as dequantize

# Quantised tensors
from fzero.kernels.quantize_codes import KINDS as KINDS
from fzero.kernels.quantize_codes import codes_a_byte as codes_a_byte
from fzero.kernels.quantize_codes import empty_codes as empty_codes

# What a record of calls has in place of torch's operators
from fzero.kernels.recorded_loops import RECORDED_LOOPS as RECORDED_LOOPS

# The registry of hot operations
from fzero.kernels.registry import AUTO as AUTO
from fzero.kernels.registry import Kernels as Kernels
from fzero.kernels.registry import Op as Op
from fzero.kernels.registry import describe as describe
from fzero.kernels.rope import rope_frequencies as rope_frequencies
from fzero.kernels.rope import rope_qk as rope_qk

# Rotary position embedding
from fzero.kernels.rope_scaling import RopeScaling as RopeScaling

# Functions of a number or a row, which depend on it alone
from fzero.kernels.rowwise import gelu as gelu
from fzero.kernels.rowwise import sigmoid as sigmoid
from fzero.kernels.rowwise import sum_in_order as sum_in_order
from fzero.kernels.rowwise import tanh as tanh

# The block sizes of kernels
from fzero.kernels.tuning import Speed as Speed

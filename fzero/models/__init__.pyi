from fzero.kernels.rope_scaling import RopeScaling as RopeScaling
from fzero.models.base import Cache as Cache
from fzero.models.base import Ctx as Ctx
from fzero.models.base import LayerDraws as LayerDraws
from fzero.models.base import Loss as Loss
from fzero.models.base import Model as Model
from fzero.models.base import ModelTraits as ModelTraits
from fzero.models.base import TokenLayout as TokenLayout
from fzero.models.base import init_params as init_params
from fzero.models.base import num_params as num_params
from fzero.models.batch import Batch as Batch
from fzero.models.batch import check_tokens as check_tokens
from fzero.models.configs import LORA as LORA
from fzero.models.configs import DeepSeekConfig as DeepSeekConfig
from fzero.models.configs import GPT2Config as GPT2Config
from fzero.models.configs import LlamaConfig as LlamaConfig
from fzero.models.configs import LoRAConfig as LoRAConfig
from fzero.models.configs import MLPConfig as MLPConfig
from fzero.models.configs import ModelConfig as ModelConfig
from fzero.models.configs import MoEConfig as MoEConfig
from fzero.models.configs import QuantizedConfig as QuantizedConfig
from fzero.models.configs import ScoreConfig as ScoreConfig
from fzero.models.configs import frozen_leaves as frozen_leaves
from fzero.models.deepseek import deepseek as deepseek
from fzero.models.dropping import layer_drop as layer_drop
from fzero.models.dropping import random_ltd as random_ltd
from fzero.models.forward import logits as logits
from fzero.models.forward import loss as loss
from fzero.models.from_module import from_module as from_module
from fzero.models.gpt2 import gpt2 as gpt2
from fzero.models.llama import llama as llama
from fzero.models.lora import lora as lora
from fzero.models.lora import merge as merge
from fzero.models.lora import set_magnitudes as set_magnitudes
from fzero.models.mixtral import mixtral as mixtral
from fzero.models.mlp import mlp as mlp
from fzero.models.preference import answer_log_probs as answer_log_probs
from fzero.models.preference import by_position as by_position
from fzero.models.preference import classify as classify
from fzero.models.preference import dpo as dpo
from fzero.models.preference import reward as reward
from fzero.models.presets import PRESETS as PRESETS
from fzero.models.presets import build as build
from fzero.models.presets import grow_vocabulary as grow_vocabulary
from fzero.models.presets import period as period
from fzero.models.presets import preset as preset
from fzero.models.presets import shorten as shorten

"""For contributors: what the other packages of fzero use."""

# Modules
from fzero.models import base as base
from fzero.models import config_values as config_values
from fzero.models import decoder as decoder
from fzero.models import dropping as dropping
from fzero.models import forward as forward
from fzero.models import preference as preference

# The experts of a block
from fzero.models.base import BIAS as BIAS

# A layered model as a value
from fzero.models.base import CODES as CODES
from fzero.models.base import DROPPED as DROPPED
from fzero.models.base import ENTROPY as ENTROPY
from fzero.models.base import LOAD as LOAD
from fzero.models.base import OF_EXPERTS as OF_EXPERTS
from fzero.models.base import Start as Start
from fzero.models.base import leaf_shapes as leaf_shapes

# The batches of a model of tokens
from fzero.models.batch import KINDS as KINDS
from fzero.models.batch import SOURCES as SOURCES
from fzero.models.batch import has_tokens as has_tokens
from fzero.models.batch import select_tokens as select_tokens

# The logits of an nn.Module for rows of tokens
from fzero.models.causal_module import RowGroup as RowGroup
from fzero.models.causal_module import cached_groups as cached_groups

# The values of models' configs
from fzero.models.config_values import BOUNDS as BOUNDS
from fzero.models.config_values import LayerKind as LayerKind
from fzero.models.config_values import hidden_units as hidden_units
from fzero.models.config_values import layers_text as layers_text
from fzero.models.config_values import parse_layers as parse_layers

# The sizes of the models, as values that say nothing of how a model computes
from fzero.models.configs import FAMILIES as FAMILIES
from fzero.models.configs import ON as ON
from fzero.models.configs import SCORE as SCORE
from fzero.models.configs import TABLES as TABLES
from fzero.models.configs import WRAPPERS as WRAPPERS
from fzero.models.configs import ConfigOver as ConfigOver
from fzero.models.configs import DecoderConfig as DecoderConfig
from fzero.models.configs import body_of as body_of
from fzero.models.configs import family_of as family_of
from fzero.models.configs import head_of as head_of
from fzero.models.configs import head_rows as head_rows
from fzero.models.configs import without_adapters as without_adapters

# The Model of a decoder that transformers' own code computes
from fzero.models.decoder import linear_targets as linear_targets

# A second head, which generation passes over
from fzero.models.deepseek import MTP_JOIN as MTP_JOIN
from fzero.models.deepseek import MTP_STACK as MTP_STACK
from fzero.models.deepseek import mtp_model as mtp_model

# An nn.Module as a Model
from fzero.models.from_module import expect_trainable as expect_trainable
from fzero.models.from_module import model_of as model_of
from fzero.models.from_module import weight_reader as weight_reader

# The layers that the models share
from fzero.models.layers import block_keys as block_keys
from fzero.models.layers import local_tokens as local_tokens

# The repeated layers of an nn.Module
from fzero.models.module_layers import CannotSplit as CannotSplit
from fzero.models.module_layers import Stacks as Stacks
from fzero.models.module_layers import choices as choices

# Learning which of two answers is preferred
from fzero.models.preference import answer_model as answer_model

# The named models, with the published sizes
from fzero.models.presets import grow_tables as grow_tables
from fzero.models.presets import with_vocab_size as with_vocab_size

# Models of `transformers` as nn.Modules without memory
from fzero.models.transformers_module import loss_of_task as loss_of_task
from fzero.models.transformers_module import make_module as make_module
from fzero.models.transformers_module import read_decoder as read_decoder
from fzero.models.transformers_module import tp_rules as tp_rules

# A Model of somebody's own functions, in a step
from fzero.models.user_functions import has_key as has_key
from fzero.models.user_functions import keyed_model as keyed_model
from fzero.models.user_functions import loss_of as loss_of
from fzero.models.user_functions import wide_sums as wide_sums

# Weights that are not one tensor
from fzero.models.weights import column_norms as column_norms
from fzero.models.weights import product_of as product_of
from fzero.models.weights import quantize_weights as quantize_weights
from fzero.models.weights import quantized as quantized

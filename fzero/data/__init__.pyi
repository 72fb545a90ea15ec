from fzero.data.auto_tokenizer import add_tokens as add_tokens
from fzero.data.batches import Sentinels as Sentinels
from fzero.data.batches import corrupt_spans as corrupt_spans
from fzero.data.batches import fill_in_middle as fill_in_middle
from fzero.data.batches import from_loader as from_loader
from fzero.data.batches import weigh_targets as weigh_targets
from fzero.data.buckets import BucketStream as BucketStream
from fzero.data.curriculum import Curriculum as Curriculum
from fzero.data.curriculum import Growth as Growth
from fzero.data.curriculum import Piece as Piece
from fzero.data.curriculum import analysis_folder as analysis_folder
from fzero.data.curriculum import analyze as analyze
from fzero.data.curriculum import describe_values as describe_values
from fzero.data.document_scan import Preparing as Preparing
from fzero.data.linked_corpus import link as link
from fzero.data.linked_corpus import link_url as link_url
from fzero.data.mixed_stream import MixedStream as MixedStream
from fzero.data.mixture import Mixture as Mixture
from fzero.data.prepare import describe as describe
from fzero.data.prepare import prepare as prepare
from fzero.data.remote_tokens import Reading as Reading
from fzero.data.token_stream import TokenStream as TokenStream
from fzero.data.token_stream import eval_batches as eval_batches
from fzero.data.token_stream import prefetch as prefetch
from fzero.data.tokenizers import Tokenizer as Tokenizer
from fzero.data.tokenizers import load_tokenizer as load_tokenizer
from fzero.data.tokens import Tokens as Tokens
from fzero.data.tokens import open_tokens as open_tokens
from fzero.data.tokens import read_meta as read_meta
from fzero.data.tokens import verify as verify

"""For contributors: what the other packages of fzero use."""

# Modules
from fzero.data import arrow_tables as arrow_tables
from fzero.data import auto_tokenizer as auto_tokenizer
from fzero.data import curriculum as curriculum
from fzero.data import tokenizer_classes as tokenizer_classes

# The tokenizer of a model's folder, with the ids of AutoTokenizer of `transformers`
from fzero.data.auto_tokenizer import changed_on_load as changed_on_load
from fzero.data.auto_tokenizer import expect_json as expect_json
from fzero.data.auto_tokenizer import missing_lines as missing_lines
from fzero.data.auto_tokenizer import missing_tokens as missing_tokens
from fzero.data.auto_tokenizer import read_tokenizer_json as read_tokenizer_json

# Documents of like length together
from fzero.data.buckets import Size as Size
from fzero.data.buckets import expect_lengths as expect_lengths

# Chat templates
from fzero.data.chat import Chat as Chat
from fzero.data.chat import chat_files as chat_files
from fzero.data.chat import encoder as encoder
from fzero.data.chat import end_tokens as end_tokens
from fzero.data.chat import read_chat as read_chat
from fzero.data.chat import render as render
from fzero.data.chat import template_files as template_files
from fzero.data.chat import write_chat as write_chat

# A number for each row of a corpus
from fzero.data.examples import Lengths as Lengths
from fzero.data.examples import LineReader as LineReader
from fzero.data.examples import describe_conversations as describe_conversations
from fzero.data.examples import prepare_conversations as prepare_conversations
from fzero.data.examples import prepare_examples as prepare_examples

# A corpus whose tokens stay in the files of another system, read in place
from fzero.data.linked_corpus import expect_unchanged as expect_unchanged
from fzero.data.linked_corpus import write_mixture as write_mixture

# A mixture of corpora as a value
from fzero.data.mixture import describe_mixture as describe_mixture
from fzero.data.mixture import open_sources as open_sources
from fzero.data.mixture import sources_of as sources_of

# How the documents of a corpus fill rows of T positions
from fzero.data.packing import FILL as FILL
from fzero.data.packing import PACKINGS as PACKINGS
from fzero.data.packing import TOO_LONG as TOO_LONG
from fzero.data.packing import Batch as Batch
from fzero.data.packing import figures as figures

# Pairs of answers, of which one is preferred, as a corpus of examples
from fzero.data.preferences import expect_label_coverage as expect_label_coverage
from fzero.data.preferences import labels_of as labels_of
from fzero.data.preferences import labels_reader as labels_reader
from fzero.data.preferences import prepare_preferences as prepare_preferences
from fzero.data.preferences import ranked_reader as ranked_reader
from fzero.data.preferences import read_reference as read_reference
from fzero.data.preferences import reference_folder as reference_folder
from fzero.data.preferences import write_reference as write_reference

# Convert text to token files, reading the sources twice
from fzero.data.prepare import Busy as Busy
from fzero.data.prepare import path_of as path_of
from fzero.data.prepare import remove_finished as remove_finished

# The tokens of a corpus in an object store, as an array whose elements are read when they are asked for
from fzero.data.remote_tokens import MIN_CACHE_BYTES as MIN_CACHE_BYTES
from fzero.data.remote_tokens import RemoteTokens as RemoteTokens

# Batches as a pure function of (seed, step)
from fzero.data.token_stream import RowStream as RowStream

# Batches as a pure function of (seed, step)
from fzero.data.tokenizer_classes import add_special_tokens as add_special_tokens
from fzero.data.tokenizer_classes import special_tokens as special_tokens

# What a tokenizer's class of `transformers` makes of a folder, as data
from fzero.data.tokenizers import ADDED as ADDED
from fzero.data.tokenizers import CONFIG as CONFIG
from fzero.data.tokenizers import MAP as MAP
from fzero.data.tokenizers import TOKENIZER as TOKENIZER
from fzero.data.tokenizers import byte_tokenizer as byte_tokenizer
from fzero.data.tokenizers import json_tokenizer as json_tokenizer
from fzero.data.tokenizers import library_of as library_of

# The token-file format and its reader
from fzero.data.tokens import SPLITS as SPLITS
from fzero.data.tokens import VERSION as VERSION
from fzero.data.tokens import digest as digest
from fzero.data.tokens import token_dtype as token_dtype

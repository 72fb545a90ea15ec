"""Text in, batches out: prepare a corpus once, then draw batches as a pure function of (seed, step)."""

from fzero.data.added_tokens import add_tokens
from fzero.data.analysis import analyze
from fzero.data.buckets import BucketStream
from fzero.data.curriculum import Curriculum, Growth, Piece
from fzero.data.linked_corpus import link
from fzero.data.loader import from_loader
from fzero.data.mixed_stream import MixedStream
from fzero.data.mixture import Mixture
from fzero.data.prepare import describe, prepare
from fzero.data.prepare_options import Preparing
from fzero.data.remote_corpus import link_url
from fzero.data.remote_tokens import Reading
from fzero.data.token_stream import TokenStream, eval_batches, prefetch
from fzero.data.tokenizers import Tokenizer, load_tokenizer
from fzero.data.tokens import Tokens, open_tokens, read_meta, verify
from fzero.data.transforms import Sentinels, corrupt_spans, fill_in_middle, weigh_targets

__all__ = [
    "BucketStream",
    "Curriculum",
    "Growth",
    "MixedStream",
    "Mixture",
    "Piece",
    "Preparing",
    "Reading",
    "Sentinels",
    "TokenStream",
    "Tokenizer",
    "Tokens",
    "add_tokens",
    "analyze",
    "corrupt_spans",
    "describe",
    "eval_batches",
    "fill_in_middle",
    "from_loader",
    "link",
    "link_url",
    "load_tokenizer",
    "open_tokens",
    "prefetch",
    "prepare",
    "read_meta",
    "verify",
    "weigh_targets",
]

from fzero.generate.completions import Completions as Completions
from fzero.generate.completions import completions as completions
from fzero.generate.completions import prefix_cache as prefix_cache
from fzero.generate.continuations import Continuation as Continuation
from fzero.generate.continuations import score_continuations as score_continuations
from fzero.generate.decoding import lookup as lookup
from fzero.generate.drafts import Draft as Draft
from fzero.generate.draws import draw as draw
from fzero.generate.draws import score as score
from fzero.generate.grammar import Grammar as Grammar
from fzero.generate.grammar import grammar_tokens as grammar_tokens
from fzero.generate.mismatch import Mismatch as Mismatch
from fzero.generate.mismatch import mismatch as mismatch
from fzero.generate.pages import Pages as Pages
from fzero.generate.pages import PageSpec as PageSpec
from fzero.generate.pages import page_spec as page_spec
from fzero.generate.prefixes import PrefixCache as PrefixCache
from fzero.generate.prompts import Completion as Completion
from fzero.generate.prompts import GenerateOptions as GenerateOptions
from fzero.generate.prompts import Prompt as Prompt
from fzero.generate.rows import DrawRow as DrawRow
from fzero.generate.rows import draw_rows as draw_rows
from fzero.generate.sampling import Sampling as Sampling
from fzero.generate.step import Step as Step
from fzero.generate.step import StepBatch as StepBatch
from fzero.generate.step import make_step as make_step

"""For contributors: what the other packages of fzero use."""

# Pages of keys and values
from fzero.generate.pages import CACHES as CACHES
from fzero.generate.pages import PAGE_TOKENS as PAGE_TOKENS
from fzero.generate.pages import pages_for as pages_for

# The samples of prompts
from fzero.generate.sequences import sequences_of as sequences_of

# A mesh and a model with which text is generated
from fzero.generate.step import expect_generates as expect_generates

# The tokens of steps whose calls are recorded
from fzero.generate.step_records import RECORDED_TOKENS as RECORDED_TOKENS

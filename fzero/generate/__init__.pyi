from fzero.generate.pages import Pages as Pages
from fzero.generate.pages import PageSpec as PageSpec
from fzero.generate.pages import page_spec as page_spec
from fzero.generate.step import Step as Step
from fzero.generate.step import StepBatch as StepBatch
from fzero.generate.step import make_step as make_step

"""For contributors: what the other packages of fzero use."""

# Pages of keys and values
from fzero.generate.pages import PAGE_TOKENS as PAGE_TOKENS

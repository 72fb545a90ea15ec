"""Decoders of `transformers` for which fzero has no functions of its own: computed by the code of the installed package."""

"""Decoders for which fzero has no functions of its own: the code of the installed transformers computes them."""

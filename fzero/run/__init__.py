"""A run of `fzero pretrain`.

config, build, run_folder, corpus, machine and memory_check come first; ranks/, resume/ and measure/ use them; pretrain
and loop use all of these; debug/ looks at runs from outside.
"""

"""`python -m fzero` is `fzero`."""

from fzero.cli.start import start

start()

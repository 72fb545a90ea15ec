"""`python -m fzero` is `fzero`."""

from fzero.cli import main

main()

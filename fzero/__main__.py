"""`python -m fzero` is `fzero`."""

from fzero.cli.main import main

main()

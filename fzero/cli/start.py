"""The entry of `fzero` and `python -m fzero`: Ctrl-C while modules are imported is one line, too."""

from __future__ import annotations

import sys
from typing import NoReturn

from fzero.run.ranks import signals


def start() -> NoReturn:
    """Run the command line and exit."""
    signals.interrupt_after_imports()
    try:
        from fzero.cli.main import main
    except KeyboardInterrupt:
        print("fzero: interrupted", file=sys.stderr)
        sys.exit(130)
    main()

"""The one rule for names that become paths of files: of leaves in a checkpoint or a store, and of files that a foreign
file names.

No such path leaves the folder that it is taken in: writers refuse a name by this rule before they write anything, and
readers before they open anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LONGEST_PART, LONGEST_PATH = 255, 3000  # bytes that file systems take
DESCRIPTION = "zarr.json"  # the file beside the chunks of an array


def path_fault(path: Any) -> str:
    """The fault of `path` as that of a file below some folder, to follow its name in a message; "" if there is none.

    It is one or more names joined by "/", none of them empty, "." or "..".

    >>> path_fault("blocks/attn/w_q"), path_fault("../w")
    ('', 'has a part ".."')
    """
    if not isinstance(path, str):
        return f"is a {type(path).__name__}, not a text"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return f'has a part "{part}"' if part else 'has an empty part (it begins or ends with "/", or has "//")'
        if "\\" in part or not part.isprintable():
            return "has a backslash or a character that cannot be printed"
        if len(part.encode(errors="surrogatepass")) > LONGEST_PART:
            return f"has a part of more than {LONGEST_PART} bytes"
    return f"has more than {LONGEST_PATH:,} bytes" if len(path.encode()) > LONGEST_PATH else ""


def leaf_fault(names: Iterable[Any]) -> str:
    """The first fault of the names of leaves that are zarr arrays of one folder, as a text that begins with the name;
    "" if there is none.

    A tree that is one leaf has the name "".

    >>> leaf_fault(["a", "b/c"]), leaf_fault([""]), leaf_fault(["a", "a/b"])
    ('', '', "leaf 'a/b' is below 'a', which is a leaf itself")
    """
    names = list(names)
    if names == [""]:
        return ""
    there = {name for name in names if isinstance(name, str)}
    for name in names:
        fault = path_fault(name)
        if fault:
            return f"leaf {name!r} {fault}"
        parts = name.split("/")
        if DESCRIPTION in parts:
            return f"leaf {name!r} has a part {DESCRIPTION!r}, which is the name of zarr's own file"
        above = next((a for n in range(1, len(parts)) if (a := "/".join(parts[:n])) in there), None)
        if above is not None:
            return f"leaf {name!r} is below {above!r}, which is a leaf itself"
    return ""

"""Run the remedy that an error names: what comes behind its semicolon, read as settings of the call that it refused."""

import ast
import inspect
import re

import pytest

import fzero

VALUE = r"""\{[^}]*\}|"[^"]*"|'[^']*'|[\w.+-][\w.+:/-]*(?:\([^()]*\))?"""

VERBS = "(?:use|take|write|give|take at least)"


def value_of(text):
    """The value that a text of Python names; else the text."""
    text = text.strip().rstrip(".,;")
    try:
        return eval(text, {"fzero": fzero}) if text.startswith("fzero.") else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def remedies_of(text, names, subject=""):
    """The alternatives that an error names, each as {setting: value}, of settings of these names.

    "use a=1 and b=2, or c d" are two; "use a in {1, 2}" and "use a=1 or 2" as well. subject: of values without a name.
    """
    clause, found, last = text.partition("; ")[2], [], subject
    named = rf"(?<![\w.])({'|'.join(names)})(?:=| in | )({VALUE})"
    for alternative in re.split(r",? or ", re.sub(r" \([^()]*\)", "", clause)):
        settings = re.findall(named, alternative)
        word = re.fullmatch(rf"(?:.*: )?\s*(?:{VERBS} )?({VALUE}|\S+)(?: would do|, .*)?\s*", alternative)
        if not settings and word and last:
            settings = [(last, word[1])]
        last = settings[-1][0] if settings else last
        whole = {name: value_of(value) for name, value in settings}
        many = [(n, v) for n, v in whole.items() if isinstance(v, set)]
        found += [{**whole, n: one} for n, v in many for one in v] if many else [whole] if whole else []
    return found


def tried(call, *, subject="", **options):
    """The remedies that the ValueError of a call with `options` names, each of which has been tried: with its settings
    the call passes."""
    with pytest.raises(ValueError) as raised:
        call(**options)
    text = str(raised.value)
    found = remedies_of(text, [*inspect.signature(call).parameters], subject)
    assert found, f"no setting is named: {text}"
    for settings in found:
        try:
            call(**{**options, **settings})
        except ValueError as error:
            raise AssertionError(f"{text!r} names {settings}, which is refused: {error}") from error
    return found

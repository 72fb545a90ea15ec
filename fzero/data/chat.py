"""Chat templates: a conversation as tokens, and which of them are the assistant's.

A template is a Jinja program that a model's folder brings along; it runs in Jinja's sandbox, with the variables and
functions that Hugging Face's `apply_chat_template` gives it. Which characters the assistant said comes from the
template's own marks, `{% generation %}`, or from rendering the conversation up to each of its turns.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fzero.core.foreign import expect_entries, read_json, read_text_file, short
from fzero.core.storage import write_text
from fzero.data.tokenizers import Tokenizer, token_dtype

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MARKS = "\U0010fffe\U0010ffff"  # no text has them: Unicode says they are no characters
Message = Mapping[str, Any]  # {"role": "user", "content": "..."}, and whatever else the template reads


class Chat(NamedTuple):
    """A chat template with the special tokens that it may name.

    >>> chat = Chat("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", {"eos_token": "#"})
    >>> render(chat, [{"role": "user", "content": "hi"}])
    'hi#'
    """

    template: str
    tokens: dict[str, str] = {}  # noqa: RUF012  (of SPECIAL, by name; never mutated)


class Example(NamedTuple):
    """A text to learn from."""

    ids: np.ndarray  # [N] of its tokens
    counted: np.ndarray  # bool [N]: the tokens that the model is to say


def read_chat(folder: str | Path) -> Chat | None:
    """The chat template in a model's folder or a run's: of chat_template.jinja, else of tokenizer_config.json; None if
    there is none.

    Raises ValueError naming a file that is not in its form.
    """
    folder, about = Path(folder), {}
    if (folder / CONFIG).is_file():
        about = read_json(folder / CONFIG)
    tokens = {}
    for name in SPECIAL:
        value = about.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    if (folder / TEMPLATE).is_file():
        return Chat(read_text_file(folder / TEMPLATE), tokens)
    found = about.get("chat_template")
    if isinstance(found, list):  # several by name
        for one in found:
            if not isinstance(one, dict):
                raise ValueError(
                    f"{folder / CONFIG}: chat_template has {short(one)}; it must be tables of name and template"
                )
            expect_entries(one, {"name": str, "template": str}, f"{folder / CONFIG}: chat_template")
        found = next((one["template"] for one in found if one["name"] == "default"), None)
    expect_entries({"chat_template": found}, {"chat_template": str | None}, str(folder / CONFIG))
    return None if found is None else Chat(found, tokens)


def write_chat(folder: Path, chat: Chat) -> None:
    """Write the files that `read_chat` reads; entries of a tokenizer_config.json that is there stay."""
    about = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    write_text(folder, CONFIG, json.dumps({**about, **chat.tokens}, indent=2) + "\n")
    write_text(folder, TEMPLATE, chat.template)


def render(chat: Chat, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, prompt: bool = False) -> str:
    """The text of a conversation. prompt: end it with the beginning of the assistant's next turn.

    Raises ValueError if the template does not take the conversation, with its own words.
    """
    return _render(chat, messages, tools, prompt)[0]


def spans_of(
    chat: Chat, messages: Sequence[Message], *, tools: Sequence[Any] | None = None
) -> list[tuple[str, list[tuple[int, int]]]]:
    """The texts to learn a conversation's assistant turns from, each with the spans [start, end) that the assistant
    says.

    It is one text, with a span for each turn, if the template marks them, or renders a turn alike whatever comes after
    it. Otherwise, as where a template leaves earlier thoughts out, each turn has a text of its own: the conversation
    up to it, as the model sees it when it answers. A span found by rendering ends with the turn's eos_token, if it has
    one. Raises ValueError if there is no turn of the assistant, and as `render`.

    >>> chat = Chat("{% for m in messages %}<{{ m.role }}>{{ m.content }}#{% endfor %}"
    ...             "{% if add_generation_prompt %}<assistant>{% endif %}", {"eos_token": "#"})
    >>> spans_of(chat, [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}])
    [('<user>1+1#<assistant>2#', [(21, 23)])]
    """
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        raise ValueError("the conversation has no assistant turn, so there is nothing to learn from it")
    text, marked = _render(chat, messages, tools, False)
    if _program(chat.template).marks:
        if not marked:
            raise ValueError("the template marks no text of this conversation as the assistant's ({% generation %})")
        return [(text, marked)]
    spans, whole = [], True
    for i in turns:
        before = render(chat, messages[:i], tools=tools, prompt=True)
        until = render(chat, messages[: i + 1], tools=tools)
        if not until.startswith(before):
            raise ValueError(
                f"the template renders message {i + 1}, of the assistant, otherwise than after its own prompt for one; "
                "mark what the assistant says with {% generation %} in the template"
            )
        said, eos = until[len(before) :], chat.tokens.get("eos_token", "")
        end = len(before) + (said.rindex(eos) + len(eos) if eos and eos in said else len(said))
        spans.append((until, (len(before), end)))
        whole = whole and text.startswith(until)
    return [(text, [span for _, span in spans])] if whole else [(until, [span]) for until, span in spans]


def examples_of(
    chat: Chat, encode: Encode, messages: Sequence[Message], *, tools: Sequence[Any] | None = None
) -> list[Example]:
    """The examples of a conversation: the texts of `spans_of` as tokens, of which those in a span count.

    encode: from `encoder`. Raises ValueError as `spans_of`.
    """
    return [encode_spans(encode, text, spans) for text, spans in spans_of(chat, messages, tools=tools)]


Encode = Callable[[str], tuple[np.ndarray, np.ndarray]]  # text -> ids [N], the characters [N, 2] of each


def encoder(tokenizer: Tokenizer) -> Encode:
    """The function from a rendered text to its ids and the characters [start, end) of each.

    Unlike the tokenizer's `encode`, special tokens in the text become their ids, as a template writes them.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    if not tokenizer.json:

        def by_bytes(text: str) -> tuple[np.ndarray, np.ndarray]:
            at = np.repeat(np.arange(len(text)), [len(c.encode("utf-8")) for c in text])
            return tokenizer.encode(text), np.stack([at, at + 1], 1)

        return by_bytes
    from tokenizers import Tokenizer as Library

    library = Library.from_str(tokenizer.json)
    library.no_padding()
    library.no_truncation()

    def by_library(text: str) -> tuple[np.ndarray, np.ndarray]:
        found = library.encode(text, add_special_tokens=False)
        return np.array(found.ids, dtype), np.array(found.offsets, np.int64).reshape(-1, 2)

    return by_library


def encode_spans(encode: Encode, text: str, spans: Sequence[tuple[int, int]]) -> Example:
    """A text as tokens, of which those count that have a character in one of the spans [start, end)."""
    ids, at = encode(text)
    counted = np.zeros(len(ids), bool)
    for start, end in spans:
        counted |= (at[:, 0] < end) & (at[:, 1] > start)
    return Example(ids, counted)


class _Program(NamedTuple):
    """A compiled template."""

    render: Callable[..., str]
    marks: bool  # whether it has {% generation %}


@functools.lru_cache(maxsize=8)
def _program(template: str) -> _Program:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension

    from fzero.data.template_sandbox import Bounded, bounded

    class Generation(Extension):
        """`{% generation %} ... {% endgeneration %}`: its text stands between the two MARKS."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_between"), [], [], body).set_lineno(line)

        def _between(self, caller: Callable[[], str]) -> str:
            return f"{MARKS[0]}{caller()}{MARKS[1]}"

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # Jinja's own escapes for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters = {name: bounded(function, name) for name, function in environment.filters.items()}
    environment.filters["tojson"] = bounded(tojson, "tojson")
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)

    try:
        parsed = environment.parse(template)
        made = environment.from_string(template)
        marks = any(_is_mark(block) for block in parsed.find_all(nodes.CallBlock))
    except (RecursionError, MemoryError, SyntaxError):  # of Python's parser, too
        raise ValueError("the chat template is nested too deeply; write it with fewer brackets") from None
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template is no Jinja template: {short(str(error), 300)[1:-1]}") from None
    return _Program(made.render, marks)


def _is_mark(block: Any) -> bool:
    """Whether a CallBlock is one of {% generation %}, and no macro's call."""
    return getattr(block.call.node, "name", "") == "_between" and hasattr(block.call.node, "identifier")


def _render(
    chat: Chat, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool
) -> tuple[str, list[tuple[int, int]]]:
    """(the text, the spans that the template marks)."""
    program = _program(chat.template)
    try:
        text = program.render(
            messages=list(messages), tools=tools, documents=None, add_generation_prompt=prompt, **chat.tokens
        )
    except Exception as error:  # a template is a program, and fails in any way
        raise ValueError(f"the chat template refuses the conversation: {short(str(error), 300)[1:-1]}") from None
    parts, spans, size = [], [], 0
    for i, part in enumerate(text.split(MARKS[0])):
        said, mark, rest = part.partition(MARKS[1])
        if i and mark and said:
            spans.append((size, size + len(said)))
        parts += [said, rest]
        size += len(said) + len(rest)
    return "".join(parts), spans

"""Chat templates: a conversation as tokens, and which of them are the assistant's.

A template is a Jinja program of a model's folder; it runs in Jinja's sandbox with what Hugging Face's
`apply_chat_template` gives it. What the assistant said comes from the template's own marks, `{% generation %}`, or from
rendering the conversation up to each turn.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from fzero import data
from fzero.core.storage import write_texts
from fzero.core.text_parsing import expect_entries, read_json, read_text_file, short
from fzero.data.tokenizers import Tokenizer, library_of, token_dtype

TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"  # the second a folder, of others by name
TOOLS = "tool_use"  # the name of a template for conversations with tools
MARKS = "\U0010fffe\U0010ffff"  # no text has them: Unicode says they are no characters
PROBE = "an answer\u2063"  # in no template
Message = Mapping[str, Any]  # {"role": "user", "content": "..."}, and whatever else the template reads


class Chat(NamedTuple):
    """A chat template with the special tokens that it may name.

    >>> chat = Chat("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", {"eos_token": "#"})
    >>> render(chat, [{"role": "user", "content": "hi"}])
    'hi#'
    """

    template: str
    tokens: dict[str, str] = {}  # noqa: RUF012  (by name; never mutated)
    tools: str = ""  # another template, for conversations with tools

    def template_of(self, tools: Sequence[Any] | None) -> str:
        """The template of a conversation with these tools."""
        return self.tools if self.tools and tools is not None else self.template


class Example(NamedTuple):
    """A text to learn from."""

    ids: np.ndarray  # [N] of its tokens
    counted: np.ndarray  # bool [N]: the tokens that the model is to say
    cut: bool = False  # whether its end was cut off, as it was too long


def read_chat(folder: str | Path) -> Chat | None:
    """The chat template in a model's folder or a run's, or None; raises ValueError naming a bad file."""
    folder = Path(folder)
    templates = {Path(name).stem: text for name, text in template_files(folder).items()}
    if os.path.lexists(folder / TEMPLATE):
        templates["default"] = read_text_file(folder / TEMPLATE)
    if not templates:
        config = (
            read_json(folder / data.tokenizer_classes.CONFIG, wide=True)
            if os.path.lexists(folder / data.tokenizer_classes.CONFIG)
            else {}
        )
        templates = templates_in(config, str(folder / data.tokenizer_classes.CONFIG))
    if "default" not in templates:
        return None
    return Chat(templates["default"], data.special_tokens(folder), templates.get(TOOLS, ""))


def template_files(folder: Path) -> dict[str, str]:
    """{name: content} of the files in a folder's additional_chat_templates."""
    return {f"{TEMPLATES}/{path.name}": read_text_file(path) for path in sorted((folder / TEMPLATES).glob("*.jinja"))}


def templates_in(config: dict[str, Any], name: str) -> dict[str, str]:
    """{name: template} in the content of a tokenizer_config.json, of which one without a name is "default"."""
    templates = config.get("chat_template")
    if isinstance(templates, list):
        for entry in templates:
            if not isinstance(entry, dict):
                raise ValueError(f"{name}: chat_template has {short(entry)}; it must be tables of name and template")
            expect_entries(entry, {"name": str, "template": str}, f"{name}: chat_template")
        return {entry["name"]: entry["template"] for entry in templates}
    if isinstance(templates, dict):
        expect_entries(templates, dict.fromkeys(templates, str), f"{name}: chat_template")
        return templates
    expect_entries({"chat_template": templates}, {"chat_template": str | None}, name)
    return {} if templates is None else {"default": templates}


def chat_files(chat: Chat, config: dict[str, Any]) -> dict[str, str]:
    """{name: content} of the files that `read_chat` reads; config: a tokenizer_config.json to extend."""
    tokens: dict[str, Any] = dict(chat.tokens)
    for name, text in chat.tokens.items():
        entry = config.get(name)
        if isinstance(entry, dict) and entry.get("content") == text:
            tokens[name] = entry  # which says more of it
    files = {data.tokenizer_classes.CONFIG: json.dumps({**config, **tokens}, indent=2, ensure_ascii=False) + "\n"}
    templates = templates_in(config, data.tokenizer_classes.CONFIG)
    if (templates.get("default"), templates.get(TOOLS, "")) == (chat.template, chat.tools):
        return files
    tool_files = {f"{TEMPLATES}/{TOOLS}.jinja": chat.tools} if chat.tools else {}
    return files | {TEMPLATE: chat.template} | tool_files


def write_chat(folder: Path, chat: Chat) -> None:
    """Write the files that `read_chat` reads; entries of a tokenizer_config.json that is there stay."""
    config = (
        read_json(folder / data.tokenizer_classes.CONFIG, wide=True)
        if os.path.lexists(folder / data.tokenizer_classes.CONFIG)
        else {}
    )
    write_texts(folder, chat_files(chat, config))


def template_texts(chat: Chat) -> list[str]:
    """The texts that are in a template's code, of branches that no conversation reaches too."""
    return list(_program(chat.template).texts)


def render(chat: Chat, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, prompt: bool = False) -> str:
    """The text of a conversation; prompt: with the beginning of the assistant's next turn."""
    return _render(chat, messages, tools, prompt)[0]


def spans_of(
    chat: Chat, messages: Sequence[Message], *, tools: Sequence[Any] | None = None
) -> list[tuple[str, list[tuple[int, int]]]]:
    """The texts to learn a conversation's assistant turns from, each with the spans [start, end) that it says.

    >>> chat = Chat("{% for m in messages %}<{{ m.role }}>{{ m.content }}#{% endfor %}"
    ...             "{% if add_generation_prompt %}<assistant>{% endif %}", {"eos_token": "#"})
    >>> spans_of(chat, [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}])
    [('<user>1+1#<assistant>2#', [(21, 23)])]
    """
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        raise ValueError("the conversation has no assistant turn, so there is nothing to learn from it")
    text, marked = _render(chat, messages, tools, False)
    if _program(chat.template_of(tools)).marks:
        if not marked:
            raise ValueError("the template marks no text of this conversation as the assistant's ({% generation %})")
        return [(text, marked)]
    spans, is_prefix = [], True
    for i in turns:
        prompt_text = render(chat, messages[:i], tools=tools, prompt=True)
        turn_text = render(chat, messages[: i + 1], tools=tools)
        if not turn_text.startswith(prompt_text):
            raise ValueError(
                f"the template renders message {i + 1}, of the assistant, otherwise than after its own prompt for one; "
                "mark what the assistant says with {% generation %} in the template"
            )
        answer, eos = turn_text[len(prompt_text) :], chat.tokens.get("eos_token", "")
        end = len(prompt_text) + (answer.rindex(eos) + len(eos) if eos and eos in answer else len(answer))
        spans.append((turn_text, (len(prompt_text), end)))
        is_prefix = is_prefix and text.startswith(turn_text)
    return [(text, [span for _, span in spans])] if is_prefix else [(turn_text, [span]) for turn_text, span in spans]


def examples_of(
    chat: Chat, encode: Encode, messages: Sequence[Message], *, tools: Sequence[Any] | None = None
) -> list[Example]:
    """The examples of a conversation: the texts of `spans_of` as tokens, of which those in a span count."""
    return [encode_spans(encode, text, spans) for text, spans in spans_of(chat, messages, tools=tools)]


class Encode(Protocol):
    """From a text to (its ids [N], the characters [N, 2] of each)."""

    def __call__(self, text: str, *, add_special: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """add_special: with the tokens that the tokenizer puts before and after a text, at [0, 0)."""
        ...


def encoder(tokenizer: Tokenizer) -> Encode:
    """The function from a text, in which special tokens count, to its ids and the characters [start, end) of each."""
    dtype = token_dtype(tokenizer.vocab_size)
    if not tokenizer.json:

        def by_bytes(text: str, *, add_special: bool = False) -> tuple[np.ndarray, np.ndarray]:
            index = np.repeat(np.arange(len(text)), [len(c.encode("utf-8")) for c in text])
            return tokenizer.encode(text), np.stack([index, index + 1], 1)

        return by_bytes
    library = library_of(tokenizer.json, tokenizer.name)

    def by_library(text: str, *, add_special: bool = False) -> tuple[np.ndarray, np.ndarray]:
        encoding = library.encode(text, add_special_tokens=add_special)
        return np.array(encoding.ids, dtype), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    return by_library


def end_tokens(chat: Chat, tokenizer: Tokenizer) -> list[int]:
    """The ids at which an answer by a template ends."""
    if not tokenizer.json:
        return []
    from tokenizers import Tokenizer as Library

    encode, end_ids = encoder(tokenizer), list[int]()
    ids = encode(chat.tokens.get("eos_token", ""))[0]
    end_ids += [int(ids[0])] if len(ids) == 1 else []
    added = Library.from_str(tokenizer.json).get_added_tokens_decoder()
    try:
        text = render(chat, [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}])
    except ValueError:  # a template may take other conversations only
        return end_ids
    tail_ids = [int(token_id) for token_id in encode(text.rpartition(PROBE)[2])[0]] if PROBE in text else []
    special_ids = [token_id for token_id in tail_ids if token_id in added and added[token_id].special]
    return list(dict.fromkeys([*end_ids, *special_ids[:1]]))


def encode_spans(encode: Encode, text: str, spans: Sequence[tuple[int, int]], *, add_special: bool = False) -> Example:
    """A text as tokens, of which those count that have a character in one of the spans [start, end)."""
    ids, char_spans = encode(text, add_special=add_special)
    counted = np.zeros(len(ids), bool)
    for start, end in spans:
        counted |= (char_spans[:, 0] < end) & (char_spans[:, 1] > start)
    return Example(ids, counted)


class _Program(NamedTuple):
    """A compiled template."""

    render: Callable[..., str]
    marks: bool  # whether it has {% generation %}
    texts: tuple[str, ...]  # its constants: what it writes as it is, and strings in its expressions


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
        compiled = environment.from_string(template)
        marks = any(_is_mark(block) for block in parsed.find_all(nodes.CallBlock))
        texts = [*(node.data for node in parsed.find_all(nodes.TemplateData))]
        texts += [node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, str)]
    except (RecursionError, MemoryError, SyntaxError):  # of Python's parser, too
        raise ValueError("the chat template is nested too deeply; write it with fewer brackets") from None
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template is no Jinja template: {short(str(error), 300)[1:-1]}") from None
    return _Program(compiled.render, marks, tuple(texts))


def _is_mark(block: Any) -> bool:
    """Whether a CallBlock is one of {% generation %}, and no macro's call."""
    return getattr(block.call.node, "name", "") == "_between" and hasattr(block.call.node, "identifier")


def _render(
    chat: Chat, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool
) -> tuple[str, list[tuple[int, int]]]:
    """(the text, the spans that the template marks)."""
    program = _program(chat.template_of(tools))
    try:
        text = program.render(
            messages=list(messages), tools=tools, documents=None, add_generation_prompt=prompt, **chat.tokens
        )
    except Exception as error:  # a template is a program, and fails in any way
        raise ValueError(f"the chat template refuses the conversation: {short(str(error), 300)[1:-1]}") from None
    parts, spans, size = [], [], 0
    for i, chunk in enumerate(text.split(MARKS[0])):
        marked, mark, remainder = chunk.partition(MARKS[1])
        if i and mark and marked:
            spans.append((size, size + len(marked)))
        parts += [marked, remainder]
        size += len(marked) + len(remainder)
    return "".join(parts), spans

"""The tokenizer of a model's folder, with the ids of AutoTokenizer of `transformers`.

It is built by its class, with the special tokens that its files name, and compared with AutoTokenizer where
`transformers` is installed; and a tokenizer gets the special tokens of a chat template that it lacks.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fzero.core.arguments import checked
from fzero.core.text_parsing import parse_json, read_json, read_text_file, short
from fzero.data.chat import Chat, encoder, render, template_texts
from fzero.data.tokenizer_classes import (
    CLASSES,
    MERGES,
    PLAIN,
    VOCABULARY,
    FolderTokens,
    TokenizerClass,
    is_byte_level,
    is_token,
    read_tokens,
    rebuild_json,
    text_of,
)
from fzero.data.tokenizers import CONFIG, TOKENIZER, Tokenizer, json_tokenizer, library_of

# What templates write that no other text has: <|user|>, <|turn>, <start_of_turn>, </s>, [INST], [/INST]. A pair of tags
# such as <tool_call> and </tool_call> is text for many models, so it is none.
TOKEN = re.compile(
    r"<[|｜][^<>|｜\s]+[|｜]?>|<[^<>|｜\s]+[|｜]>|<(?:start|end|begin)_[a-z_]+>|</?s>"
    r"|<(?:bos|eos|pad|unk|sep|cls|mask)>|\[/?[A-Z][A-Z_]+\]"
)
PROBES = (("system", "user", "assistant", "user"), ("user", "assistant"))  # roles of conversations


@checked()
def add_tokens(tokenizer: Tokenizer, tokens: Sequence[str]) -> Tokenizer:
    """Return the tokenizer with these special tokens: with the next ids, in this order, as `add_special_tokens` of
    transformers gives them; those that it has keep their ids, and are never split from then on.

    Raises ValueError for one that is empty, and for bytes, which have no other tokens.

    >>> from tokenizers import Tokenizer as Library, models
    >>> json = Library(models.BPE({"a": 0, "b": 1}, [])).to_str()
    >>> from fzero.data.tokenizers import json_tokenizer
    >>> larger = add_tokens(json_tokenizer(json, "ab", eos=1), ["<|user|>"])
    >>> larger.vocab_size
    3
    """
    for text in tokens:
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"the tokens to add are {short(list(tokens))}; {text!r} is no text of one")
    if not tokens:
        return tokenizer
    expect_json(tokenizer)
    from tokenizers import AddedToken

    base_tokenizer, library = (library_of(tokenizer.json, tokenizer.name) for _ in range(2))
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokens])
    for text in tokens:
        new = library.token_to_id(text)
        holder = text if new is None else base_tokenizer.id_to_token(new)
        if holder not in (None, text):
            raise ValueError(
                f"{tokenizer.name}: its ids have holes, and {holder!r} has the one that {text} would get, next by "
                "their count; number its tokens from 0 without holes first"
            )
    return json_tokenizer(library.to_str(), tokenizer.name, tokenizer.eos)


def expect_json(tokenizer: Tokenizer) -> None:
    """Raise ValueError for bytes."""
    if not tokenizer.json:
        raise ValueError("the tokenizer is bytes, which has no tokens but them, so none can be added")


def template_tokens(chat: Chat) -> list[str]:
    """The texts that a template writes as tokens, by its constants and renderings."""
    texts = template_texts(chat)
    for roles in PROBES:
        try:
            texts.append(render(chat, [{"role": role, "content": "a"} for role in roles], prompt=True))
        except ValueError:  # a template may take other conversations only
            continue
    written = [token for text in texts for token in TOKEN.findall(text)]
    named = [token for token in chat.tokens.values() if token and any(token in text for text in texts)]
    return list(dict.fromkeys([*written, *named]))


def missing_tokens(chat: Chat, tokenizer: Tokenizer) -> dict[str, int]:
    """{token that the template writes: the tokens that it is split into}, of those that are no single one."""
    if not tokenizer.json:
        return {}
    encode = encoder(tokenizer)
    sizes = {token: len(encode(token)[0]) for token in template_tokens(chat)}
    return {token: size for token, size in sizes.items() if size != 1}


def missing_lines(chat: Chat | None, tokenizer: Tokenizer, fix: str) -> list[str]:
    """A line that names the tokens of a template that a tokenizer lacks, or []."""
    missing = missing_tokens(chat, tokenizer) if chat is not None else {}
    if not missing:
        return []
    parts = ", ".join(f"{token} into {size}" for token, size in missing.items())
    return [
        f"the vocabulary lacks tokens that the chat template writes, and splits them: {parts}; {fix} gives each an id "
        "(leave them split if the model has learnt them so)"
    ]


if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Library

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of a token
OTHERS = ("tokenizer.model", "tiktoken.model", "tekken.json", "spiece.model", "sentencepiece.bpe.model", "vocab.txt")
MOST_SPECIAL = 100  # tokens to compare
# What tokenizers that are alike by most texts do otherwise.
TEXTS = (
    "",
    "a b",
    " lead and trail ",
    "a  b   c\n\n\td \r\n e",
    "It's I'LL don't DON'Tab 1234567 3.14 x2",
    "caf\u00e9 cafe\u0301 \ufb01 \u00c5 na\u00efve",
    "\u4e2d\u6587 \u306b\u307b\u3093 \u0939\u093f\u0928\u094d\u0926\u0940 \U0001f600",
    "def f(x):\n    return x*2  # no\u00a0break \u2581",
)


def read_tokenizer_json(folder: Path, config_folder: Path) -> str | None:
    """The content of the tokenizer.json in `folder`, as AutoTokenizer loads it; None without a vocabulary."""
    tokens, path = read_tokens(config_folder), folder / TOKENIZER
    builder = CLASSES.get(tokens.class_name)
    if not path.is_file() and not expect_merges(folder, builder):
        return None
    if tokens.config.get("split_special_tokens"):
        raise ValueError(
            f"{config_folder / CONFIG}: split_special_tokens is {short(tokens.config['split_special_tokens'])}; fzero "
            "supports False alone, as the tokens that a chat template writes are whole; take the entry out of the file"
        )
    fresh = not path.is_file()
    content = json.dumps(from_merges(folder)) if fresh else read_text_file(path)
    plain, library = library_of(content, str(path)), build_tokenizer(content, path, tokens, fresh=fresh)
    expect_same_ids(library, config_folder, tokens)
    return content if library.to_str() == plain.to_str() and not fresh else library.to_str()


def changed_on_load(folder: Path) -> str:
    """The class by which AutoTokenizer makes another tokenizer of a folder than its tokenizer.json; "" if none does."""
    tokens, path = read_tokens(folder), folder / TOKENIZER
    if not path.is_file() or tokens.class_name not in CLASSES:
        return ""
    content = read_text_file(path)
    unchanged = build_tokenizer(content, path, tokens).to_str() == library_of(content, str(path)).to_str()
    return "" if unchanged else tokens.class_name


def build_tokenizer(content: str, path: Path, tokens: FolderTokens, *, fresh: bool = False) -> Library:
    """The tokenizer that AutoTokenizer makes of a tokenizer.json; fresh: there was no such file."""
    table, builder = parse_json(content, str(path), wide=True), CLASSES.get(tokens.class_name)
    rebuilt_json = content
    if builder is not None:
        rebuilt_json = json.dumps(rebuild_json(table, builder, tokens.config, tokens.named, path), ensure_ascii=False)
    library = library_of(rebuilt_json, str(path))
    if not tokens.complete:
        theirs = [entry for entry in table.get("added_tokens") or [] if isinstance(entry, dict) and is_token(entry)]
        tokens = tokens._replace(listed={**tokens.listed, **{entry["id"]: entry for entry in theirs}})
    make_whole(library, tokens, plain=builder is not None and builder.plain)
    begins = builder is not None and (builder.begins or (fresh and bool(tokens.config.get("add_bos_token"))))
    ends = builder is not None and fresh and bool(tokens.config.get("add_eos_token"))
    if begins or ends:
        first, last = (text_of(tokens.named.get(name, "")) for name in ("bos_token", "eos_token"))
        surround(library, first * begins, last * ends)
    return library


def expect_merges(folder: Path, builder: TokenizerClass | None) -> bool:
    """Whether a folder without tokenizer.json has vocab.json and merges.txt; raises ValueError for others."""
    if builder is not None and builder.files and all((folder / name).is_file() for name in (VOCABULARY, MERGES)):
        return True
    foreign_name = next((name for name in (*OTHERS, VOCABULARY) if (folder / name).is_file()), None)
    if foreign_name is not None:
        raise ValueError(
            f"{folder / foreign_name}: fzero reads a tokenizer.json, and there is none; write one by transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    return False


def from_merges(folder: Path) -> dict[str, Any]:
    """A tokenizer.json of vocab.json and merges.txt."""
    lines = read_text_file(folder / MERGES).split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    model = {"type": "BPE", "vocab": read_json(folder / VOCABULARY, wide=True), "merges": merges}
    return {"version": "1.0", "added_tokens": [], "post_processor": None, "model": model}


def make_whole(library: Library, tokens: FolderTokens, *, plain: bool) -> None:
    """Make the tokens that a folder names whole; new ones get the next ids; plain: without their flags."""
    names = {text_of(token) for token in tokens.named.values()}
    new = [added_token(tokens.listed[i], text_of(tokens.listed[i]) in names) for i in sorted(tokens.listed)]
    existing = {token.content for token in (*library.get_added_tokens_decoder().values(), *new)}
    for token in (*tokens.named.values(), *tokens.extra):
        if text_of(token) and text_of(token) not in existing:
            existing.add(text_of(token))
            new.append(added_token(token, True))
    library.add_tokens(new)
    special = [text_of(token) for token in (*tokens.named.values(), *tokens.extra)]
    library.add_tokens([added_token(text, True) for text in dict.fromkeys(special) if text and plain])


def added_token(token: Any, special: bool) -> AddedToken:
    """A token of a file as the library has it."""
    from tokenizers import AddedToken as LibraryToken

    flags = {name: value for name, value in token.items() if name in FLAGS} if isinstance(token, dict) else {}
    return LibraryToken(text_of(token), **(flags | {"special": True} if special else flags))


def surround(library: Library, begin: str, end: str) -> None:
    """Put a token before each text and one after it; "" is none."""
    from tokenizers import processors

    single = f"{begin + ':0 ' if begin else ''}$A:0{' ' + end + ':0' if end else ''}"
    ids = [(token, library.token_to_id(token)) for token in (begin, end) if token]
    library.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)


def expect_same_ids(library: Library, folder: Path, tokens: FolderTokens) -> None:
    """Raise ValueError naming a text that AutoTokenizer has other ids of, or an unknown class."""
    name = tokens.class_name
    fix = (
        f"where tokenizer.json is meant as it stands, set tokenizer_class to {PLAIN!r} in {CONFIG}; else let "
        "transformers write what it loads: save_pretrained of AutoTokenizer, and then that entry"
    )
    if not name or (is_byte_level(folder) and "Llama" in str(tokens.config.get("tokenizer_class"))):
        return  # releases of transformers before 5.20 lose the spaces of Llama 3
    if importlib.util.find_spec("transformers") is None:
        if name not in (*CLASSES, PLAIN):
            raise ValueError(
                f"{folder}: the class of its tokenizer is {name}, which transformers builds otherwise than "
                f"tokenizer.json says; install transformers, by which fzero compares the ids, or, {fix}"
            )
        return
    theirs = load_auto_tokenizer(folder)
    if theirs is None:
        return
    special = [*map(text_of, tokens.named.values()), *map(text_of, tokens.extra), *theirs.added_tokens_encoder]
    for text in [*TEXTS, *(f"a{token} b {token}c " for token in dict.fromkeys(special[:MOST_SPECIAL]))]:
        for add_special in (True, False):
            actual_ids = library.encode(text, add_special_tokens=add_special).ids
            expected_ids = ids_of(theirs, text, add_special=add_special)
            if expected_ids is not None and actual_ids != expected_ids:
                raise ValueError(
                    f"{folder}: AutoTokenizer of transformers ({type(theirs).__name__}) has the ids "
                    f"{short(expected_ids)} of {text!r}, and its files give fzero {short(actual_ids)}; {fix}"
                )


def ids_of(theirs: Any, text: str, *, add_special: bool) -> list[int] | None:
    """The ids of a tokenizer of `transformers`; None of a text that it does not take."""
    try:
        return list(theirs(text, add_special_tokens=add_special)["input_ids"])
    except Exception:  # whatever their code raises
        return None


def load_auto_tokenizer(folder: Path) -> Any:
    """AutoTokenizer of a folder; None where that loads none, as for one that needs code of its own."""
    with silent_log("transformers"):
        import transformers

        try:
            return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception:  # whatever their code and a folder's files raise
            return None


@contextlib.contextmanager
def silent_log(name: str) -> Iterator[None]:
    """A context in which a logger writes no warnings."""
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)

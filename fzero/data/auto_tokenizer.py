"""The tokenizer of a model's folder, with the ids of AutoTokenizer of `transformers`: built by its class, with the
special tokens that its files name, and compared with AutoTokenizer itself where `transformers` is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fzero.core.text_parsing import parse_json, read_json, read_text_file, short
from fzero.data.tokenizer_classes import (
    CLASSES,
    CONFIG,
    MERGES,
    PLAIN,
    TOKENIZER,
    VOCABULARY,
    FolderTokens,
    TokenizerClass,
    is_byte_level,
    is_token,
    read_tokens,
    rebuild_json,
    text_of,
)
from fzero.data.tokenizers import library_of

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

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
    """The content of the tokenizer.json in `folder`, as AutoTokenizer loads it with the other files in `config_folder`;
    made of vocab.json and merges.txt where there are those alone; None if there is no vocabulary.

    Raises ValueError for a vocabulary of another kind alone, for entries whose meaning fzero lacks, and where
    AutoTokenizer of the `transformers` that is installed has other ids.
    """
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


def build_tokenizer(content: str, path: Path, tokens: FolderTokens, *, fresh: bool = False) -> Tokenizer:
    """The tokenizer that AutoTokenizer makes of the content of a tokenizer.json. fresh: that there was no such file, so
    that add_bos_token and add_eos_token are read."""
    table, builder = parse_json(content, str(path), wide=True), CLASSES.get(tokens.class_name)
    rebuilt_json = content
    if builder is not None:
        rebuilt_json = json.dumps(rebuild_json(table, builder, tokens.config, tokens.named, path), ensure_ascii=False)
    library = library_of(rebuilt_json, str(path))
    if not tokens.complete:
        theirs = [entry for entry in table.get("added_tokens") or [] if isinstance(entry, dict) and is_token(entry)]
        tokens = tokens._replace(listed={**tokens.listed, **{entry["id"]: entry for entry in theirs}})
    add_tokens(library, tokens, plain=builder is not None and builder.plain)
    begins = builder is not None and (builder.begins or (fresh and bool(tokens.config.get("add_bos_token"))))
    ends = builder is not None and fresh and bool(tokens.config.get("add_eos_token"))
    if begins or ends:
        first, last = (text_of(tokens.named.get(name, "")) for name in ("bos_token", "eos_token"))
        surround(library, first * begins, last * ends)
    return library


def expect_merges(folder: Path, builder: TokenizerClass | None) -> bool:
    """Whether a folder without tokenizer.json has vocab.json and merges.txt for its class; raises ValueError if it has
    another vocabulary."""
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


def add_tokens(library: Tokenizer, tokens: FolderTokens, *, plain: bool) -> None:
    """Make the tokens that a folder names whole; those that the vocabulary lacks get the next ids. plain: without
    their flags."""
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


def surround(library: Tokenizer, begin: str, end: str) -> None:
    """Put a token before each text and one after it; "" is none."""
    from tokenizers import processors

    single = f"{begin + ':0 ' if begin else ''}$A:0{' ' + end + ':0' if end else ''}"
    ids = [(token, library.token_to_id(token)) for token in (begin, end) if token]
    library.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)


def expect_same_ids(library: Tokenizer, folder: Path, tokens: FolderTokens) -> None:
    """Raise ValueError naming a text that AutoTokenizer has other ids of, and, without `transformers`, for a class
    that fzero does not build."""
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

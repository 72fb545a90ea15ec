"""The special tokens that a model's folder names: in special_tokens_map.json, tokenizer_config.json, or by the class of
its tokenizer in `transformers`, as AutoTokenizer takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fzero.core.foreign import read_json, read_text_file

CONFIG, MAP, TOKENIZER = "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FURTHER = "additional_special_tokens"  # the list of others
END = "<|endoftext|>"
# What a class of transformers takes for a token that no file names; other classes take none.
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CLASSES: dict[str, dict[str, str]] = {
    "LlamaTokenizer": LLAMA,
    "CodeLlamaTokenizer": LLAMA,
    "GPT2Tokenizer": {"bos_token": END, "eos_token": END, "unk_token": END},
    "Qwen2Tokenizer": {"eos_token": END, "unk_token": END, "pad_token": END},
    "GemmaTokenizer": {
        **{"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"},
        **{"pad_token": "<pad>", "mask_token": "<mask>"},
    },
}
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of a token
PLAIN = "TokenizersBackend"  # the class of a tokenizer.json alone
# The class that a model_type has, which is taken in place of another one, or where none is named.
CLASS_OF: dict[str, str] = dict.fromkeys(("olmo2", "phi3", "mistral", "mixtral"), PLAIN)
CLASS_OF |= dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), "Qwen2Tokenizer")
CLASS_OF |= {"gpt2": "GPT2Tokenizer", "gemma2": "GemmaTokenizer", "gemma3_text": "GemmaTokenizer"}
ALWAYS = ("qwen2",)  # whatever class the file names


def special_tokens(folder: Path) -> dict[str, str]:
    """{name: text} of the tokens of SPECIAL that a folder names; raises ValueError naming a file that is no JSON."""
    about, beside = read_both(folder)
    named: dict[str, Any] = {**CLASSES.get(class_of(folder, about), {}), **about, **beside}
    texts = {name: named[name].get("content") if isinstance(named[name], dict) else named[name]
             for name in SPECIAL if name in named}  # fmt: skip
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def class_of(folder: Path, about: dict[str, Any]) -> str:
    """The class that AutoTokenizer takes for a folder with this tokenizer_config.json; "" for a run, which names its
    tokens."""
    hf = read_json(folder / "config.json", wide=True) if (folder / "config.json").is_file() else {}
    model_type, named = hf.get("model_type"), about.get("tokenizer_class") or hf.get("tokenizer_class")
    if not isinstance(model_type, str):
        return ""
    usual = CLASS_OF.get(model_type)
    named = named.removesuffix("Fast") if isinstance(named, str) else None
    if named is None:
        return usual or PLAIN
    if usual != PLAIN and named == "LlamaTokenizer" and is_byte_level(folder):
        return PLAIN
    return usual if usual == PLAIN or (usual and model_type in ALWAYS) else named


def is_byte_level(folder: Path) -> bool:
    """Whether the tokenizer.json of a folder is of bytes, as that of Llama 3, whose class is not LlamaTokenizer."""
    return (folder / TOKENIZER).is_file() and '"ByteLevel"' in read_text_file(folder / TOKENIZER)


def named_tokens(folder: Path) -> list[Any]:
    """The special tokens that a folder names, as texts or tables of FLAGS, in the order in which AutoTokenizer takes
    them."""
    about, named = read_both(folder)
    extra = about.get("extra_special_tokens")
    of_model = extra.values() if isinstance(extra, dict) else ()
    return [*by_id(about), *special_tokens(folder).values(), *of_model, *further(about, named)]


def by_id(about: dict[str, Any]) -> list[Any]:
    """The tokens that a tokenizer_config.json lists by their ids, in their order."""
    listed = about.get("added_tokens_decoder")
    listed = listed if isinstance(listed, dict) else {}
    return [listed[key] for key in sorted(listed, key=lambda key: int(key) if key.isdecimal() else 0)]


def read_both(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of tokenizer_config.json, and of a special_tokens_map.json that is read beside it."""
    about = read_json(folder / CONFIG, wide=True) if (folder / CONFIG).is_file() else {}
    beside = (folder / MAP).is_file() and "added_tokens_decoder" not in about
    return about, read_json(folder / MAP, wide=True) if beside else {}


def further(about: dict[str, Any], named: dict[str, Any]) -> list[Any]:
    """The list of special tokens besides SPECIAL of the contents of `read_both`."""
    lists = (about.get("extra_special_tokens"), about.get(FURTHER), named.get(FURTHER))
    return next((tokens for tokens in lists if isinstance(tokens, list) and tokens), [])


def text_of(token: Any) -> str:
    """The text of one of `named_tokens`, "" if it has none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def with_special(about: dict[str, Any], named: dict[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """The first of the contents of `read_both` in whose list of further special tokens these are, too."""
    key = "extra_special_tokens" if isinstance(about.get("extra_special_tokens"), list) else FURTHER
    there = [*by_id(about), *further(about, named), *(of.get(name) for of in (about, named) for name in SPECIAL)]
    new = [text for text in tokens if text not in map(text_of, there)]
    return {**about, key: [*further(about, named), *new]} if new else about


def mark_special(json: str, folder: Path) -> str:
    """The content of a tokenizer.json, in which the tokens that a folder names apart, and the vocabulary has, are
    whole: AutoTokenizer does not split them, whether the file says so or not."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Library

    library = Library.from_str(json)
    have, new = {token.content for token in library.get_added_tokens_decoder().values()}, []
    for one in named_tokens(folder):
        text = text_of(one)
        if not text or text in have or library.token_to_id(text) is None:
            continue
        flags = {name: value for name, value in one.items() if name in FLAGS} if isinstance(one, dict) else {}
        have.add(text)
        new.append(AddedToken(text, **{"special": True, "normalized": False, **flags}))
    library.add_tokens(new)
    return library.to_str() if new else json

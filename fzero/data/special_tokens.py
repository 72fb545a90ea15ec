"""The special tokens that a model's folder names: in special_tokens_map.json, tokenizer_config.json, or by the class of
its tokenizer in `transformers`, as AutoTokenizer takes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fzero.core.foreign import read_json, read_text_file

CONFIG, MAP, TOKENIZER = "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
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
    about = read_json(folder / CONFIG, wide=True) if (folder / CONFIG).is_file() else {}
    named: dict[str, Any] = {**CLASSES.get(class_of(folder, about), {}), **about}
    if (folder / MAP).is_file() and "added_tokens_decoder" not in about:
        named |= read_json(folder / MAP, wide=True)
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


def mark_special(json: str, folder: Path) -> str:
    """The content of a tokenizer.json, in which the tokens that a folder names apart, and the vocabulary has, are
    whole: AutoTokenizer does not split them, whether the file says so or not."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Library

    about = read_json(folder / CONFIG, wide=True) if (folder / CONFIG).is_file() else {}
    listed = about.get("added_tokens_decoder")
    more = about.get("extra_special_tokens") or about.get("additional_special_tokens") or []
    named: list[Any] = [*(listed.values() if isinstance(listed, dict) else ()), *special_tokens(folder).values()]
    named += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
    library = Library.from_str(json)
    have, new = {token.content for token in library.get_added_tokens_decoder().values()}, []
    for one in named:
        text = one.get("content") if isinstance(one, dict) else one
        if not isinstance(text, str) or not text or text in have or library.token_to_id(text) is None:
            continue
        flags = {name: value for name, value in one.items() if name in FLAGS} if isinstance(one, dict) else {}
        have.add(text)
        new.append(AddedToken(text, **{"special": True, "normalized": False, **flags}))
    library.add_tokens(new)
    return library.to_str() if new else json

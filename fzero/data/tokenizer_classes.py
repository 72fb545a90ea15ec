"""What a tokenizer's class of `transformers` makes of a folder, as data.

A class of CLASSES takes from tokenizer.json the vocabulary, the merges and the post-processor alone; special tokens are
those of special_tokens_map.json, tokenizer_config.json, added_tokens.json, or of the class.

Ref: transformers 5.17 to 5.24, models/*/tokenization_*.py and models/auto/tokenization_auto.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fzero.core.text_parsing import expect_entries, read_json, read_text_file, short
from fzero.data.tokenizers import ADDED, CONFIG, MAP, TOKENIZER

VOCABULARY, MERGES = "vocab.json", "merges.txt"
END = "<|endoftext|>"
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# Of Qwen; %s is what counts as a letter, and then that inside of brackets.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?%s+|\p{N}| ?[^\s%s\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TokenizerEntry = dict[str, Any]  # of a tokenizer.json


class TokenizerClass(NamedTuple):
    """A class that builds a tokenizer around a vocabulary."""

    tokens: dict[str, str]  # that it takes for special where no file names others
    # from the entries of tokenizer_config.json: normalizer, pre_tokenizer, decoder
    components: Callable[[TokenizerEntry], TokenizerEntry]
    model: TokenizerEntry = {}  # noqa: RUF012  (entries of a BPE; never mutated)
    begins: bool = False  # whether a text has bos_token before it, whatever tokenizer.json says
    bare: bool = False  # whether the post-processor of tokenizer.json is dropped
    plain: bool = False  # whether special tokens lose their flags, such as lstrip
    files: bool = False  # whether it reads vocab.json and merges.txt where there is no tokenizer.json


def byte_level(prefix: bool, regex: bool = True) -> TokenizerEntry:
    """A pre-tokenizer or decoder of bytes."""
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def byte_level_class(
    first: TokenizerEntry | None, prefix_splitters: list[TokenizerEntry], *, regex: bool = True
) -> Callable[[TokenizerEntry], TokenizerEntry]:
    """The parts of a tokenizer of bytes; prefix_splitters: pre-tokenizers before that of bytes."""

    def components(config: TokenizerEntry) -> TokenizerEntry:
        last = byte_level(bool(config.get("add_prefix_space")), regex)
        split = {"type": "Sequence", "pretokenizers": [*prefix_splitters, last]} if prefix_splitters else last
        return {"normalizer": first, "pre_tokenizer": split, "decoder": byte_level(True)}

    return components


def sentencepiece_class(strip: bool | None, legacy: bool) -> Callable[[TokenizerEntry], TokenizerEntry]:
    """The parts of a tokenizer of SentencePiece's pieces; strip: whether decoding drops a first space."""

    def components(config: TokenizerEntry) -> TokenizerEntry:
        prefix = config.get("add_prefix_space") in (None, True)
        scheme = ("always" if legacy and config.get("legacy") else "first") if prefix else "never"
        last = (
            [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if (prefix if strip is None else strip) else []
        )
        return {
            "normalizer": None,
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
            "decoder": {"type": "Sequence", "decoders": [*PIECES, *last]},
        }

    return components


def replace(pattern: str, content: str) -> TokenizerEntry:
    """A normalizer or decoder."""
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def qwen_splitter(letter: str, mark: str) -> TokenizerEntry:
    """The pre-tokenizer of Qwen."""
    return {"type": "Split", "pattern": {"Regex": WORDS % (letter, mark)}, "behavior": "Isolated", "invert": False}


PIECES = [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
NFC, DIGITS = {"type": "NFC"}, {"type": "Digits", "individual_digits": True}
QWEN = {"eos_token": END, "unk_token": END, "pad_token": END}
GPT2 = {"bos_token": END, "eos_token": END, "unk_token": END}
GEMMA_PARTS = {
    "normalizer": replace(" ", "▁"),
    "pre_tokenizer": {
        **{"type": "Split", "pattern": {"String": " "}},
        **{"behavior": "MergedWithPrevious", "invert": False},
    },
    "decoder": {"type": "Sequence", "decoders": PIECES},
}
FALLBACK = {"fuse_unk": True, "byte_fallback": True}
CLASSES: dict[str, TokenizerClass] = {
    "LlamaTokenizer": TokenizerClass(LLAMA, sentencepiece_class(None, True), FALLBACK),
    "CodeLlamaTokenizer": TokenizerClass(
        {
            **LLAMA,
            **{"prefix_token": "▁<PRE>", "middle_token": "▁<MID>", "suffix_token": "▁<SUF>"},
            **{"eot_token": "▁<EOT>", "fill_token": "<FILL_ME>"},
        },
        sentencepiece_class(True, False),
        {**FALLBACK, "unk_token": "unk_token"},
        begins=True,
    ),
    "GPT2Tokenizer": TokenizerClass(GPT2, byte_level_class(None, []), files=True),
    "CodeGenTokenizer": TokenizerClass(GPT2, byte_level_class(None, []), files=True),
    "GPTNeoXTokenizer": TokenizerClass(
        {**GPT2, "pad_token": "<|padding|>"}, byte_level_class(NFC, []), bare=True, files=True
    ),
    "Qwen2Tokenizer": TokenizerClass(
        QWEN, byte_level_class(NFC, [qwen_splitter(r"\p{L}", r"\p{L}")], regex=False), plain=True, files=True
    ),
    "Qwen3_5Tokenizer": TokenizerClass(
        QWEN, byte_level_class(NFC, [qwen_splitter(r"[\p{L}\p{M}]", r"\p{L}\p{M}")], regex=False)
    ),
    "CohereTokenizer": TokenizerClass(
        {
            **{"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "unk_token": "<UNK>"},
            **{"sep_token": "<SEP>", "pad_token": "<PAD>", "cls_token": "<CLS>", "mask_token": "<MASK_TOKEN>"},
        },
        byte_level_class(NFC, [DIGITS]),
        files=True,
    ),
    "GemmaTokenizer": TokenizerClass(
        {
            **{"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"},
            **{"pad_token": "<pad>", "mask_token": "<mask>"},
        },
        lambda _: GEMMA_PARTS,
        {**FALLBACK, "unk_token": "unk_token"},
    ),
}  # fmt: skip
PLAIN = "TokenizersBackend"  # the class of a tokenizer.json alone
SAME = ("PreTrainedTokenizer", "BloomTokenizer", "PythonBackend")  # which are that class too
# The model_types of a class, which is taken in place of another one, or where none is named.
MODELS = {
    PLAIN: "arctic beam bigbird_pegasus chatlm ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite "
    "got_ocr2 gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared hyperclovax internlm2 internlm3 "
    "iquestcoder jamba kimi_linear mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mistral3 mixtral "
    "modernbert-decoder nemotron nvfp4 olmo2 olmo3 olmo_hybrid persimmon phi3 phi3_v phimoe stablelm xlm-roberta-xl",
    "GPT2Tokenizer": "codegen dbrx emu3 gpt2 gpt_neo gptj jais2 opt phi starcoder2",
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma zaya",
    "Qwen2Tokenizer": "dots3_note moss_transcribe_diarize qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next",
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
    "CohereTokenizer": "cohere cohere2",
    "BertTokenizer": "bert electra ernie git megatron-bert",
    "RobertaTokenizer": "bart data2vec-text roberta roberta-prelayernorm",
    "XLMRobertaTokenizer": "trocr xlm-roberta xmod",
    "T5Tokenizer": "musicgen musicgen_melody",
    "WhisperTokenizer": "whisper",
    "XGLMTokenizer": "xglm",
    "BigBirdTokenizer": "big_bird",
    "BioGptTokenizer": "biogpt",
    "BlenderbotTokenizer": "blenderbot",
    "BlenderbotSmallTokenizer": "blenderbot-small",
    "CamembertTokenizer": "camembert",
    "CpmAntTokenizer": "cpmant",
    "CTRLTokenizer": "ctrl",
    "GPTNeoXJapaneseTokenizer": "gpt_neox_japanese",
    "MBartTokenizer": "mbart",
    "MvpTokenizer": "mvp",
    "OpenAIGPTTokenizer": "openai-gpt",
    "PegasusTokenizer": "pegasus",
    "PLBartTokenizer": "plbart",
    "ProphetNetTokenizer": "prophetnet",
    "ReformerTokenizer": "reformer",
    "RemBertTokenizer": "rembert",
    "RoCBertTokenizer": "roc_bert",
    "RoFormerTokenizer": "roformer",
    "XLMTokenizer": "xlm",
    "XLNetTokenizer": "xlnet",
}
CLASS_OF: dict[str, str] = {model: name for name, models in MODELS.items() for model in models.split()}
ALWAYS = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp")  # whatever class the file names


def class_of(folder: Path, config: TokenizerEntry) -> str:
    """The class that AutoTokenizer takes for a folder with this tokenizer_config.json; "" for a run."""
    hf = read_json(folder / "config.json", wide=True) if (folder / "config.json").is_file() else {}
    model_type, named = hf.get("model_type"), config.get("tokenizer_class") or hf.get("tokenizer_class")
    if not isinstance(model_type, str):
        return ""
    usual = CLASS_OF.get(model_type)
    named = named.removesuffix("Fast") if isinstance(named, str) else None
    if usual == PLAIN or named is None:
        return usual or PLAIN
    if model_type in ALWAYS:
        return usual or PLAIN
    plain = named in SAME or named == PLAIN or (named == "LlamaTokenizer" and is_byte_level(folder))
    return PLAIN if plain else named


def is_byte_level(folder: Path) -> bool:
    """Whether the tokenizer.json of a folder is of bytes, as that of Llama 3."""
    return (folder / TOKENIZER).is_file() and '"ByteLevel"' in read_text_file(folder / TOKENIZER)


def rebuild_json(
    content: TokenizerEntry, builder: TokenizerClass, config: TokenizerEntry, named: dict[str, Any], path: Path
) -> TokenizerEntry:
    """The content of a tokenizer.json as a class builds it anew, without its added tokens."""
    expect_entries(content, {"model": dict}, str(path))
    vocab, merges = content["model"].get("vocab"), content["model"].get("merges", [])
    if isinstance(vocab, list):  # of a Unigram: pieces and their scores
        vocab = {entry[0] if isinstance(entry, list) else entry: i for i, entry in enumerate(vocab)}
    expect_entries(
        {"model.vocab": vocab, "model.merges": merges}, {"model.vocab": dict, "model.merges": list}, str(path)
    )
    unknown = named.get("unk_token")
    model = {
        **{"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False},
        **{"continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False, **builder.model},
        **{"vocab": vocab, "merges": merges},
    }
    if builder.model.get("unk_token"):
        model["unk_token"] = unknown["content"] if isinstance(unknown, dict) else unknown
        if model["unk_token"] not in vocab:
            raise ValueError(
                f"{path}: has no {short(model['unk_token'])}, which is unk_token of its class in transformers; name "
                "one that it has in tokenizer_config.json"
            )
    post_processor = None if builder.bare else content.get("post_processor")
    return {
        **content,
        **builder.components(config),
        "model": model,
        "added_tokens": [],
        "post_processor": post_processor,
    }


SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class FolderTokens(NamedTuple):
    """The tokens that a folder names apart from its vocabulary, as texts or tables."""

    class_name: str  # as in tokenizer_classes.class_of
    config: dict[str, Any]  # tokenizer_config.json
    named: dict[str, Any]  # bos_token and the like
    extra: list[Any]  # special tokens without a name
    listed: dict[int, dict[str, Any]]  # by id, of added_tokens_decoder, else of added_tokens.json
    complete: bool  # whether no others of tokenizer.json are taken


def special_tokens(folder: Path) -> dict[str, str]:
    """{name: text} of the special tokens that a folder names; raises ValueError."""
    return {name: text_of(token) for name, token in read_tokens(folder).named.items()}


def text_of(token: Any) -> str:
    """The text of a token."""
    return token["content"] if isinstance(token, dict) else token


def is_token(value: Any) -> bool:
    """Whether an entry of a file is a token."""
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def pop_named(entries: dict[str, Any]) -> dict[str, Any]:
    """The extra_special_tokens of entries that have names, which are taken out."""
    extra = entries.get("extra_special_tokens")
    return dict(entries.pop("extra_special_tokens")) if isinstance(extra, dict) else {}


def read_tokens(folder: Path) -> FolderTokens:
    """The tokens of a folder, in the order in which AutoTokenizer takes its files."""
    config = read_json(folder / CONFIG, wide=True) if (folder / CONFIG).is_file() else {}
    class_name = class_of(folder, config)
    builder = CLASSES.get(class_name)
    entries, listed = dict(config), config.get("added_tokens_decoder")
    if not entries.get("extra_special_tokens"):
        entries["extra_special_tokens"] = entries.pop("additional_special_tokens", None)
    named_extra = pop_named(entries)
    named = {**(builder.tokens if builder else {}), **named_extra, **entries}
    if (folder / MAP).is_file() and "added_tokens_decoder" not in config:
        first, map_entries = entries.get("extra_special_tokens"), read_json(folder / MAP, wide=True)
        entries |= map_entries
        if isinstance(first, list) and isinstance(map_entries.get("extra_special_tokens"), list):
            entries["extra_special_tokens"] = [*first, *map_entries["extra_special_tokens"]]
        named_extra |= pop_named(entries)
        named |= named_extra | map_entries
    extra = entries.get("extra_special_tokens") or entries.get("additional_special_tokens")
    order = dict.fromkeys([*SPECIAL, *(name for name in named if name.endswith("_token")), *named_extra])
    named = {name: named[name] for name in order if is_token(named.get(name))}
    extra = [token for token in extra if is_token(token)] if isinstance(extra, list) else []
    by_id: dict[int, dict[str, Any]] = {}
    if isinstance(listed, dict):
        tables = {i: token for i, token in listed.items() if isinstance(token, dict) and is_token(token)}
        by_id = {int(i): token for i, token in tables.items() if i.isdecimal()}
    elif "added_tokens_decoder" not in config and (folder / ADDED).is_file():
        special = {text_of(token) for token in (*named.values(), *extra)}
        for text, i in read_json(folder / ADDED, wide=True).items():
            if isinstance(i, int):
                by_id[i] = {"content": text, "special": text in special, "normalized": text not in special}
    return FolderTokens(class_name, config, named, extra, by_id, "added_tokens_decoder" in config)


def add_special_tokens(config: dict[str, Any], token_map: dict[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """A tokenizer_config.json in whose list of special tokens without a name these are, too."""
    keys = ("extra_special_tokens", "additional_special_tokens")
    lists = (table.get(key) for table in (config, token_map) for key in keys)
    extra = next((value for value in lists if isinstance(value, list) and value), [])
    listed = config.get("added_tokens_decoder")
    candidates = [*extra, *(listed.values() if isinstance(listed, dict) else ()), *config.values(), *token_map.values()]
    texts = {text_of(value) for value in candidates if is_token(value)}
    new = [text for text in tokens if text not in texts]
    return {**config, keys[not isinstance(config.get(keys[0]), list)]: [*extra, *new]} if new else config

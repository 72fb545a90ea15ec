"""What a tokenizer's class of `transformers` makes of a folder, as data: AutoTokenizer takes a class by the folder's
files, and a class of CLASSES takes from tokenizer.json the vocabulary, the merges and the post-processor alone.

Ref: transformers 5.17 to 5.24, models/*/tokenization_*.py and models/auto/tokenization_auto.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fzero.core.foreign import expect_entries, read_json, read_text_file, short

TOKENIZER, VOCABULARY, MERGES = "tokenizer.json", "vocab.json", "merges.txt"
END = "<|endoftext|>"
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# Of Qwen; %s is what counts as a letter, and then that inside of brackets.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?%s+|\p{N}| ?[^\s%s\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
Part = dict[str, Any]  # of a tokenizer.json


class TokenizerClass(NamedTuple):
    """A class that builds a tokenizer around a vocabulary."""

    tokens: dict[str, str]  # that it takes for special where no file names others
    parts: Callable[[Part], Part]  # from the entries of tokenizer_config.json: normalizer, pre_tokenizer, decoder
    model: Part = {}  # noqa: RUF012  (entries of a BPE; never mutated)
    begins: bool = False  # whether a text has bos_token before it, whatever tokenizer.json says
    bare: bool = False  # whether the post-processor of tokenizer.json is dropped
    plain: bool = False  # whether special tokens lose their flags, such as lstrip
    files: bool = False  # whether it reads vocab.json and merges.txt where there is no tokenizer.json


def byte_level(prefix: bool, regex: bool = True) -> Part:
    """A pre-tokenizer or decoder of bytes."""
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def of_bytes(first: Part | None, before: list[Part], *, regex: bool = True) -> Callable[[Part], Part]:
    """The parts of a tokenizer of bytes; first: its normalizer, before: pre-tokenizers before that of bytes."""

    def parts(about: Part) -> Part:
        last = byte_level(bool(about.get("add_prefix_space")), regex)
        split = {"type": "Sequence", "pretokenizers": [*before, last]} if before else last
        return {"normalizer": first, "pre_tokenizer": split, "decoder": byte_level(True)}

    return parts


def of_pieces(strip: bool | None, legacy: bool) -> Callable[[Part], Part]:
    """The parts of a tokenizer of SentencePiece's pieces. strip: whether decoding drops a first space, None for as
    add_prefix_space says; legacy: whether the entry of that name is read."""

    def parts(about: Part) -> Part:
        prefix = about.get("add_prefix_space") in (None, True)
        scheme = ("always" if legacy and about.get("legacy") else "first") if prefix else "never"
        last = (
            [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if (prefix if strip is None else strip) else []
        )
        return {
            "normalizer": None,
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
            "decoder": {"type": "Sequence", "decoders": [*PIECES, *last]},
        }

    return parts


def replace(pattern: str, content: str) -> Part:
    """A normalizer or decoder."""
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def isolated(letter: str, mark: str) -> Part:
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
    "LlamaTokenizer": TokenizerClass(LLAMA, of_pieces(None, True), FALLBACK),
    "CodeLlamaTokenizer": TokenizerClass(
        {
            **LLAMA,
            **{"prefix_token": "▁<PRE>", "middle_token": "▁<MID>", "suffix_token": "▁<SUF>"},
            **{"eot_token": "▁<EOT>", "fill_token": "<FILL_ME>"},
        },
        of_pieces(True, False),
        {**FALLBACK, "unk_token": "unk_token"},
        begins=True,
    ),
    "GPT2Tokenizer": TokenizerClass(GPT2, of_bytes(None, []), files=True),
    "CodeGenTokenizer": TokenizerClass(GPT2, of_bytes(None, []), files=True),
    "GPTNeoXTokenizer": TokenizerClass({**GPT2, "pad_token": "<|padding|>"}, of_bytes(NFC, []), bare=True, files=True),
    "Qwen2Tokenizer": TokenizerClass(
        QWEN, of_bytes(NFC, [isolated(r"\p{L}", r"\p{L}")], regex=False), plain=True, files=True
    ),
    "Qwen3_5Tokenizer": TokenizerClass(
        QWEN, of_bytes(NFC, [isolated(r"[\p{L}\p{M}]", r"\p{L}\p{M}")], regex=False)
    ),
    "CohereTokenizer": TokenizerClass(
        {
            **{"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "unk_token": "<UNK>"},
            **{"sep_token": "<SEP>", "pad_token": "<PAD>", "cls_token": "<CLS>", "mask_token": "<MASK_TOKEN>"},
        },
        of_bytes(NFC, [DIGITS]),
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


def class_of(folder: Path, about: Part) -> str:
    """The class that AutoTokenizer takes for a folder with this tokenizer_config.json: PLAIN, of CLASSES, or another;
    "" for a run, whose tokenizer.json is as it was loaded."""
    hf = read_json(folder / "config.json", wide=True) if (folder / "config.json").is_file() else {}
    model_type, named = hf.get("model_type"), about.get("tokenizer_class") or hf.get("tokenizer_class")
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
    """Whether the tokenizer.json of a folder is of bytes, as that of Llama 3, whose class is not LlamaTokenizer."""
    return (folder / TOKENIZER).is_file() and '"ByteLevel"' in read_text_file(folder / TOKENIZER)


def rebuilt(content: Part, builder: TokenizerClass, about: Part, named: dict[str, Any], where: Path) -> Part:
    """The content of a tokenizer.json as a class builds it anew, without its added tokens; named: special tokens by
    name. Raises ValueError for one that has no vocabulary."""
    expect_entries(content, {"model": dict}, str(where))
    vocab, merges = content["model"].get("vocab"), content["model"].get("merges", [])
    if isinstance(vocab, list):  # of a Unigram: pieces and their scores
        vocab = {one[0] if isinstance(one, list) else one: i for i, one in enumerate(vocab)}
    expect_entries(
        {"model.vocab": vocab, "model.merges": merges}, {"model.vocab": dict, "model.merges": list}, str(where)
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
                f"{where}: has no {short(model['unk_token'])}, which is unk_token of its class in transformers; name "
                "one that it has in tokenizer_config.json"
            )
    after = None if builder.bare else content.get("post_processor")
    return {**content, **builder.parts(about), "model": model, "added_tokens": [], "post_processor": after}

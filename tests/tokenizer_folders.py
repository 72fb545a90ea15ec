"""Folders with small tokenizers as `transformers` and people write them: of bytes and of pieces, built by one class or
another."""

import json
import random

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HINDI = "\u0939\u093f\u0928\u094d\u0926\u0940"
WORDS = ["the quick brown fox 12345 jumps over", "It's a lazy dog, it's DON'T you know? 12 34", "x\r\ny\n\n\tz"] * 4
WORDS += [
    "def f(x):\n    return x * 2\n\n",
    "\u00e9t\u00e9 caf\u00e9 na\u00efve",
    "o'Tab x'Tab",
    f"{HINDI} {HINDI}",
] * 4
TEXTS = (
    *("", " ", "\n", "a\n", "  two", "the quick\n\n\tbrown 12345", "it's DON'T", "x\r\ny\u00a0z"),
    *("fox<|im_end|> the </s>x <s> y", "<new> <img> a<x>b <e>[PAD]dog lazy <tool>q <m> z"),
    *("\u00e9t\u00e9 cafe\u0301 \ufb01 \u4e2d\u6587 \U0001f600 \u2581x", f"{HINDI} o'Tab"),
)
BYTES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|padding|>"]
PIECES = ["<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<mask>"]


def of_bytes(special=BYTES, **parts):
    """A tokenizer of bytes; parts: in place of its own."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library.train_from_iterator(
        WORDS,
        trainers.BpeTrainer(
            vocab_size=700, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
        ),
    )
    # Its merges go across what the words of another pre-tokenizer would be, so that ids show which one there is.
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, value in parts.items():
        setattr(library, name, value)
    return library


def of_pieces(begin=None):
    """A tokenizer of pieces with bytes to fall back to, as that of Llama 2; begin: the token before a text."""
    library = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    replaced = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(replaced)
    special = [*PIECES, *(f"<0x{i:02X}>" for i in range(256))]
    library.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False))
    table = json.loads(library.to_str())
    library = Tokenizer.from_str(json.dumps({**table, "added_tokens": table["added_tokens"][: len(PIECES)]}))
    return template(library, begin) if begin else library


def template(library, begin, end=None):
    """The tokenizer with tokens around a text."""
    ids = [(token, library.token_to_id(token)) for token in (begin, end) if token]
    single = f"{begin} $A {end or ''}".strip()
    library.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return library


LIBRARIES = {
    "bytes": of_bytes,
    "bytes between": lambda: template(of_bytes(), "<|im_start|>", "<|endoftext|>"),
    "bytes with a post-processor": lambda: of_bytes(post_processor=processors.ByteLevel(trim_offsets=False)),
    "bytes by NFC": lambda: of_bytes(normalizer=normalizers.NFC()),
    "bytes with a first space": lambda: of_bytes(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "bytes with one token": lambda: of_bytes(["<|im_end|>"]),
    "pieces": of_pieces,
    "pieces after <s>": lambda: of_pieces("<s>"),
    "pieces after <bos>": lambda: of_pieces("<bos>"),
}
CONTENTS: dict[str, str] = {}  # of LIBRARIES, each made once


def content_of(name):
    """The tokenizer.json of one of LIBRARIES."""
    if name not in CONTENTS:
        CONTENTS[name] = LIBRARIES[name]().to_str()
    return CONTENTS[name]


def flags(content, **changes):
    """A token with its flags."""
    return {"content": content, **dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False), **changes}


M = {"__type": "AddedToken", **flags("<m>", lstrip=True, normalized=True)}
LISTED = {"0": flags("the", normalized=True, special=False), "7": flags("fox", lstrip=True, single_word=True)}
TYPES = ("qwen3", "qwen2", "llama", "mistral", "gpt2", "gemma2", "gpt_neox", "cohere", "qwen3_5_text", "olmo2",
         "deepseek_v3", "phi3", "smollm3", "falcon", "phi")  # fmt: skip
NAMES = (None, "PreTrainedTokenizerFast", "TokenizersBackend", "GPT2TokenizerFast", "Qwen2Tokenizer",
         "Qwen3_5Tokenizer", "LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GemmaTokenizerFast",
         "GPTNeoXTokenizer", "CohereTokenizer", "CodeGenTokenizer", "Nothing", "BertTokenizer")  # fmt: skip
OPTIONS = (
    {"add_prefix_space": True}, {"add_prefix_space": False}, {"legacy": True}, {"legacy": False},
    {"add_bos_token": True}, {"add_eos_token": True}, {"bos_token": None}, {"pad_token": "[PAD]"},
    {"additional_special_tokens": ["<|im_end|>", "<new>"]}, {"extra_special_tokens": {"image_token": "<img>"}},
    {"added_tokens_decoder": {}}, {"added_tokens_decoder": {"5": flags("<|im_end|>", rstrip=True, special=True)}},
    {"added_tokens_decoder": LISTED}, {"image_token": "<img>"}, {"unk_token": "the"}, {"mask_token": M},
    {"clean_up_tokenization_spaces": True}, {"model_max_length": 7}, {"trim_offsets": False}, {"use_fast": False},
)  # fmt: skip
MAPS = (None, None, {"eos_token": "<|im_end|>"}, {"pad_token": "dog"},
        {"eos_token": flags("<e>"), "additional_special_tokens": ["<x>", "<y>"]})  # fmt: skip
ADDED = (None, None, {"<tool>": 900, "lazy": 901, "<|im_end|>": 2})


def write_folder(to, library, model_type, about=None, named=None, added=None, *, merges=False, **hf):
    """Write a folder: tokenizer.json of one of LIBRARIES, or its vocab.json and merges.txt, and other files."""
    to.mkdir(parents=True)
    contents = {"tokenizer_config.json": about, "special_tokens_map.json": named, "added_tokens.json": added}
    contents["config.json"] = {"model_type": model_type, "eos_token_id": 0, **hf}
    for name, content in contents.items():
        if content is not None:
            (to / name).write_text(json.dumps(content))
    if merges:
        Tokenizer.from_str(content_of(library)).model.save(str(to))
    else:
        (to / "tokenizer.json").write_text(content_of(library))
    return to


def draw_folder(to, seed):
    """Write a folder of drawn files; returns what was drawn."""
    rng = random.Random(seed)
    library, model_type, name = (rng.choice(some) for some in (tuple(LIBRARIES), TYPES, NAMES))
    about = {key: value for some in rng.sample(OPTIONS, rng.choice((0, 1, 2))) for key, value in some.items()}
    hf = {"tokenizer_class": name} if name and rng.random() < 0.2 else {}
    about |= {"tokenizer_class": name} if name and not hf else {}
    named, added, merges = rng.choice(MAPS), rng.choice(ADDED), rng.random() < 0.15
    write_folder(to, library, model_type, about or None, named, added, merges=merges, **hf)
    return library, model_type, about, named, added, merges, hf

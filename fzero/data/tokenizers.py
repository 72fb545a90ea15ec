"""Three tokenizers with one interface: bytes, any Hugging Face tokenizer.json, and a BPE trained on the corpus.

The `tokenizers` library is imported only by functions that need it: bytes and start-up do not.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fzero.core.arguments import checked
from fzero.core.text_parsing import read_text_file, short
from fzero.data.tokens import PREPARE_AGAIN, read_meta, token_dtype

# Files of a tokenizer in a folder that transformers saved.
TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
MAP, ADDED = "special_tokens_map.json", "added_tokens.json"

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

EOS_OPTION = "eos= (--eos)"
USUAL_EOS = ("<|endoftext|>", "</s>", "<|end_of_text|>")


class Tokenizer(NamedTuple):
    """A tokenizer as functions between a text and ids."""

    name: str  # "bytes", "bpe:4096" or the name given to a tokenizer.json
    vocab_size: int  # one more than the largest id
    eos: int  # the id that ends a document; encode never returns it
    encode: Callable[[str], np.ndarray]  # text -> [N] ids, no token added, in the smallest dtype that holds them
    encode_all: Callable[[Sequence[str]], list[np.ndarray]]  # the same of several texts, faster
    decode: Callable[[Sequence[int]], str]  # ids -> text; eos ids are left out
    json: str = ""  # the content of tokenizer.json; "" for bytes

    def meta(self) -> dict[str, Any]:
        """What the meta.json of a corpus has of it.

        >>> byte_tokenizer().meta()
        {'tokenizer': 'bytes', 'eos': 0, 'vocab_size': 256, 'dtype': 'uint8'}
        """
        dtype = token_dtype(self.vocab_size).name
        entries = {"tokenizer": self.name, "eos": self.eos, "vocab_size": self.vocab_size, "dtype": dtype}
        return entries | ({"tokenizer_sha256": sha256_of(self.json)} if self.json else {})


def sha256_of(json: str) -> str:
    """The digest of the content of a tokenizer.json."""
    return hashlib.sha256(json.encode()).hexdigest()


def byte_tokenizer() -> Tokenizer:
    """The tokenizer whose ids are the UTF-8 bytes: vocab_size 256, eos = 0 (NUL, which no text may contain).

    >>> byte_tokenizer().encode("né").tolist()
    [110, 195, 169]
    """

    def encode(text: str) -> np.ndarray:
        if "\0" in text:
            raise ValueError(
                "text contains a NUL character, which ends a document here; remove it or use another tokenizer"
            )
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(ids: Sequence[int]) -> str:
        return bytes(i for i in _as_list(ids) if i != 0).decode("utf-8", errors="replace")

    return Tokenizer("bytes", 256, 0, encode, lambda texts: list(map(encode, texts)), decode)


def json_tokenizer(json: str, name: str, eos: str | int | None = None, eos_entry: str = EOS_OPTION) -> Tokenizer:
    """The tokenizer of a Hugging Face tokenizer.json, without its padding, truncation and added tokens."""
    library = library_of(json, name)
    library.encode_special_tokens = True
    vocabulary = library.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ValueError(f"{name}: its vocabulary is empty")
    vocab_size = max(vocabulary.values()) + 1  # not the count: a vocabulary may have holes
    if type(eos) not in (int, str, type(None)) or (type(eos) is int and not 0 <= eos < vocab_size):
        raise ValueError(
            f"{name}: the end-of-document token is {short(eos)}, by {eos_entry}; it must be a token, or an id below "
            f"{vocab_size}"
        )
    eos_id = eos if isinstance(eos, int) else _find_eos(vocabulary, name, eos, eos_entry)
    dtype = token_dtype(vocab_size)

    def ids_of(encoding: Any) -> np.ndarray:
        ids = np.array(encoding.ids, dtype)
        if (ids == eos_id).any():
            raise ValueError(
                f"text contains {library.id_to_token(eos_id)!r}, the end-of-document token of {name}; "
                f"remove it from the text or choose another token by {eos_entry}"
            )
        return ids

    def encode(text: str) -> np.ndarray:
        return ids_of(library.encode(text, add_special_tokens=False))

    def encode_all(texts: Sequence[str]) -> list[np.ndarray]:
        return list(map(ids_of, library.encode_batch_fast(texts, add_special_tokens=False)))

    def decode(ids: Sequence[int]) -> str:
        return library.decode([i for i in _as_list(ids) if i != eos_id], skip_special_tokens=False)

    return Tokenizer(name, vocab_size, eos_id, encode, encode_all, decode, json)


def library_of(json: str, name: str) -> "Library":
    """The tokenizer of the library of a tokenizer.json, without padding and truncation; raises ValueError."""
    from tokenizers import Tokenizer as Library

    try:
        with _silent_stderr():
            library = Library.from_str(json)
            library.no_padding()
            library.no_truncation()
            return library
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and a panic is not even that
        raise ValueError(f"{name}: not a Hugging Face tokenizer.json ({short(str(error), 300)})") from None


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """A context in which file 2 is dropped, where a panic of the library prints."""
    saved_fd, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved_fd, 2)
        os.close(saved_fd)
        os.close(null)


def train_bpe(texts: Iterable[str], vocab_size: int, eos: str | None = None) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` tokens, eos (default <|endoftext|>) included, trained on `texts`.

    Raises ValueError for vocab_size < 257 (256 bytes and eos), and when the texts have too few repeated pairs for so
    many tokens.

    Ref: Sennrich et al. 2016, arXiv:1508.07909, section 3.2; over bytes: Radford et al. 2019 (GPT-2), section 2.2.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, trainers

    name = f"bpe:{vocab_size}"
    if vocab_size < 257:
        raise ValueError(f"{name}: a byte-level BPE needs at least 257 tokens (256 bytes and the end of a document)")
    eos = USUAL_EOS[0] if eos is None else eos
    library = Library(models.BPE())
    library.pre_tokenizer = _splitter()
    library.decoder = decoders.ByteLevel()
    alphabet = library.pre_tokenizer.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[eos], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(texts, trainer)
    if (actual_size := library.get_vocab_size()) != vocab_size:
        raise ValueError(
            f"{name}: this corpus yields only {actual_size} tokens; use bpe:{actual_size} or smaller, or more text"
        )
    return json_tokenizer(library.to_str(), name, eos)


def words_of_bpe(text: str) -> list[str]:
    """The words of a text within which `train_bpe` merges bytes.

    >>> words_of_bpe("a text")
    ['a', 'Ġtext']
    """
    return [word for word, _ in _splitter().pre_tokenize_str(text)]


def _splitter() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False)


@checked()
def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of the prepared corpus in `folder`.

    Raises ValueError if meta.json or tokenizer.json is missing or damaged.
    """
    meta = read_meta(folder)
    path = Path(folder) / "tokenizer.json"
    tokenizer = byte_tokenizer()
    if meta["tokenizer"] != "bytes":
        if not path.is_file():
            raise ValueError(
                f"{path}: no such file, but meta.json names the tokenizer {meta['tokenizer']}; {PREPARE_AGAIN}"
            )
        tokenizer = json_tokenizer(read_text_file(path), str(path), meta["eos"])
    if (tokenizer.vocab_size, tokenizer.eos) != (meta["vocab_size"], meta["eos"]):
        raise ValueError(
            f"{path}: vocab_size={tokenizer.vocab_size}, eos={tokenizer.eos}, but meta.json says vocab_size="
            f"{meta['vocab_size']}, eos={meta['eos']}: not the tokenizer of this corpus; {PREPARE_AGAIN}"
        )
    expected_digest = meta.get("tokenizer_sha256", sha256_of(tokenizer.json))  # corpora of before have none
    if tokenizer.json and expected_digest != sha256_of(tokenizer.json):
        raise ValueError(
            f"{path}: is not the file that made the tokens of this corpus; put that back, or {PREPARE_AGAIN}"
        )
    return tokenizer._replace(name=meta["tokenizer"])


def _find_eos(vocabulary: dict[str, int], name: str, eos: str | None, entry: str) -> int:
    if eos is not None:
        if eos not in vocabulary:
            raise ValueError(
                f"{name}: the end-of-document token {eos!r} is not in its vocabulary; name one that is by {entry}"
            )
        return vocabulary[eos]
    matches = [token for token in USUAL_EOS if token in vocabulary]
    if len(matches) != 1:
        raise ValueError(
            f"{name}: which token ends a document? Of the usual {', '.join(USUAL_EOS)} it has "
            f"{', '.join(matches) or 'none'}; name the one to use by {entry}"
        )
    return vocabulary[matches[0]]


def _as_list(ids: Any) -> list[int]:
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)

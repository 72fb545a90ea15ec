"""Special tokens of a chat template: those that a tokenizer lacks, and a tokenizer that has them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fzero.core.arguments import checked
from fzero.core.text_parsing import short
from fzero.data.chat import Chat, encoder, render, template_texts
from fzero.data.tokenizers import Tokenizer, json_tokenizer, library_of

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
    """The texts that a template writes as tokens: in its constants, and in what it makes of roles and `chat.tokens`."""
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
    """{token that the template writes: the tokens that it is split into}, of those that are no single one. Empty for
    bytes, which split everything."""
    if not tokenizer.json:
        return {}
    encode = encoder(tokenizer)
    sizes = {token: len(encode(token)[0]) for token in template_tokens(chat)}
    return {token: size for token, size in sizes.items() if size != 1}


def missing_lines(chat: Chat | None, tokenizer: Tokenizer, fix: str) -> list[str]:
    """A line that names the tokens of a template that a tokenizer lacks, [] if it has all. fix: what adds them."""
    missing = missing_tokens(chat, tokenizer) if chat is not None else {}
    if not missing:
        return []
    parts = ", ".join(f"{token} into {size}" for token, size in missing.items())
    return [
        f"the vocabulary lacks tokens that the chat template writes, and splits them: {parts}; {fix} gives each an id "
        "(leave them split if the model has learnt them so)"
    ]

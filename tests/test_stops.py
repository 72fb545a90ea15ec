"""The text of a sequence while it is drawn: the same however it is split into tokens, and it ends where it should."""

import random

import pytest
from tokenizer_folders import content_of

from fzero.data import json_tokenizer
from fzero.data.tokenizers import byte_tokenizer, train_bpe
from fzero.generate.sampling import Sampling
from fzero.generate.stops import LENGTH, SPAN, STOP_ID, STOP_TEXT, UNKNOWN, StopRules, feed, start_text, stop_rules

TEXT = "naïve 中文 Ωmega 😀👩‍👩‍👧 end\n\nEND ENDING\ufffd!  “quoted” हिन्दी <|im_end|> x"
STOPS = (
    (),
    ("END",),
    ("\n\n",),
    ("ENDING", "END I"),
    ("😀👩", "ende", "é"),
    ("zz", "中文 Ω"),
    ("aïve", "ïv"),
    ("!", "x"),
)


def reference(text, stops, include):
    """(the text, whether it has ended) by the first character behind which a stop text is there."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if include else end - max(map(len, found))], True
    return text, False


def splits(raw, rng, longest):
    """The bytes of a text as tokens: (ids, the decoder of these ids)."""
    table = []
    while raw:
        size = rng.randint(1, longest)
        table.append(raw[:size])
        raw = raw[size:]
    return list(range(len(table))), lambda ids: b"".join(table[i] for i in ids).decode("utf-8", "replace")


def follow(rules, ids, rng, most=1, prompt=()):
    """(the text of all pieces, the tokens used, the last state), the tokens fed a few at a time."""
    state, text, used = start_text(rules, prompt), "", 0
    while used < len(ids) and not state.reason:
        out = feed(rules, state, ids[used : used + rng.randint(1, most)])
        assert not text.startswith(UNKNOWN) or UNKNOWN in TEXT
        state, text, used = out.state, text + out.text, used + out.used
    return text, used, state


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_every_split_into_tokens_gives_the_same_text(stops, include):
    rng = random.Random(str(stops))
    expected, ended = reference(TEXT, stops, include)
    for longest in (1, 1, 2, 3, 5, 9, 40):
        for _ in range(12):
            ids, decode = splits(TEXT.encode(), rng, longest)
            rules = StopRules(decode, texts=stops, include=include, max_tokens=len(ids))
            text, used, state = follow(rules, ids, rng, rng.choice((1, 4)))
            assert (text, state.reason) == (expected, STOP_TEXT if ended else LENGTH)
            # The first token behind which the stop text is whole; one that ends within a character does not hold it.
            whole = decode(ids[:used])
            assert not ended or (
                any(s in whole for s in stops) and not any(s in decode(ids[: used - 1]) for s in stops)
            )


def test_what_is_given_out_is_as_much_as_is_certain():
    rules = StopRules(lambda ids: bytes(ids).decode(errors="replace"), texts=("END", "Nx"))
    state, given = start_text(rules), []
    for token in "aE€ENyENxz".encode()[:13]:
        out = feed(rules, state, [token])
        state = out.state
        given.append(out.text)
        if state.reason:
            break
    assert given == ["a", "", "", "", "E€", "", "", "ENy", "", "", "E"]  # E waits, € is three bytes
    assert state.reason == STOP_TEXT
    with pytest.raises(ValueError, match="the sequence has ended"):
        feed(rules, state, [1])


def tokenizer_of(name):
    if name == "fzero's bpe":
        return train_bpe([TEXT, "the end of the text", "END END ENDING 中文中文 naïve naïve"] * 3, 300)
    return byte_tokenizer() if name == "fzero's bytes" else json_tokenizer(content_of(name), name, 0)


@pytest.mark.parametrize("name", ["fzero's bytes", "fzero's bpe", "bytes", "bytes with a first space", "pieces"])
def test_a_tokenizers_text_is_that_of_all_its_ids(name):
    """And decoded with few tokens before."""
    tokenizer, rng, longest = tokenizer_of(name), random.Random(name), []

    def decode(ids):
        longest.append(len(ids))
        return tokenizer.decode(ids)

    for text in (TEXT, "a  b   c", " lead", "it's a text of a few words, and some more of them. " * 4):
        ids = [int(i) for i in tokenizer.encode(text.replace("\0", ""))]
        for cut in {0, len(ids) // 3}:  # the first are a prompt's
            prompt, drawn = ids[:cut], ids[cut:]
            longest.clear()
            rules = StopRules(decode, max_tokens=len(drawn))
            got, used, state = follow(rules, drawn, rng, 3, prompt)
            whole = tokenizer.decode(ids)
            assert (used, state.reason) == (len(drawn), LENGTH) and max(longest) <= 6 * SPAN
            if not cut:
                assert got == whole
            else:
                assert whole.endswith(got) and got.strip(UNKNOWN)


def test_an_id_ends_it_and_is_no_text():
    rules = StopRules(lambda ids: bytes(ids).decode(errors="replace"), frozenset((9, 0)), ("END",))
    out = feed(rules, start_text(rules), [*b"an EN", 9, *b"more"])
    assert (out.text, out.used, out.state.reason, out.state.token_count) == ("an EN", 6, STOP_ID, 6)
    cut = feed(rules, start_text(rules), [*b"a\xe4\xb8", 0])
    assert cut.text == "a" + UNKNOWN and cut.state.reason == STOP_ID


def fallback(ids):
    """Bytes as tokenizers with a fallback to bytes decode them: of a run that is no text, each is unknown."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return UNKNOWN * len(ids)


def test_a_cut_character_leaves_those_before_it_and_one_of_the_prompt_goes_on():
    for decode in (fallback, lambda ids: bytes(ids).decode(errors="replace")):
        cut = feed(StopRules(decode, max_tokens=10), start_text(StopRules(decode)), "中文中中".encode()[:10])
        assert (cut.text, cut.state.reason) == ("中文中" + UNKNOWN, LENGTH)
        rules = StopRules(decode, max_tokens=4)
        for begin in (1, 2):
            assert (
                feed(rules, start_text(rules, "中".encode()[:begin]), "中文".encode()[begin : begin + 4]).text[0]
                == "中"
            )


def test_min_tokens_holds_for_stop_texts_and_max_tokens_ends():
    def texts(least):
        rules = StopRules(lambda ids: bytes(ids).decode(), texts=("ab",), min_tokens=least, max_tokens=7)
        return feed(rules, start_text(rules), b"abababababab")

    assert [texts(n).text for n in (0, 2, 3, 4, 5)] == ["", "ab", "ab", "abab", "abab"]
    assert (texts(9).text, texts(9).used, texts(9).state.reason) == ("abababa", 7, LENGTH)


def test_rules_of_a_request():
    sampling = Sampling(stop=("x",), stop_ids=(3,), include_stop=True, min_tokens=2, max_tokens=9)
    rules = stop_rules(sampling, bytes.decode, eos=(0,), longest=5)
    assert rules[1:] == (frozenset((0, 3)), ("x",), True, 2, 5)
    assert stop_rules(Sampling(ignore_eos=True), bytes.decode, eos=(0,)).ids == frozenset()


def test_bytes_that_are_no_character_do_not_wait_for_ever():
    rules = StopRules(lambda ids: bytes(ids).decode(errors="replace"))
    out = feed(rules, start_text(rules), b"\xff" * 500)
    assert len(out.text) > 400 and len(out.state.ids) < 100

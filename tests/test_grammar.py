"""Texts of a grammar: every one that is drawn is valid, by every tokenizer."""

import json
import re
from dataclasses import replace

import pytest
import torch
from grammar_schemas import SCHEMAS
from tokenizer_folders import content_of

from fzero import models
from fzero.core import packages, prng
from fzero.data import json_tokenizer
from fzero.data.tokenizers import byte_tokenizer
from fzero.generate import Draft, GenerateOptions, Prompt, completions, grammar
from fzero.generate.draws import draw
from fzero.generate.grammar import Grammar, advance, grammar_mask, grammar_tokens, start_grammar
from fzero.generate.rows import DrawRow, draw_rows
from fzero.generate.sampling import Sampling

TOKENIZERS = {
    "fzero's bytes": byte_tokenizer,
    "bytes": lambda: json_tokenizer(content_of("bytes"), "bytes", 0),
    "pieces": lambda: json_tokenizer(content_of("pieces"), "pieces", 2),
}


@pytest.fixture(scope="module")
def tokens():
    """Of each tokenizer."""
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'fzero[grammar]'")
    return {name: (make(), grammar_tokens(make())) for name, make in TOKENIZERS.items()}


def logits_of(tokenizer, seed):
    """Of chance, in favour of what ends a text."""
    logits = prng.normal(prng.key(seed), (tokenizer.vocab_size,))
    texts = [tokenizer.decode([i]).strip() for i in range(tokenizer.vocab_size)]
    logits[[bool(text) and set(text) <= set('}]",:') for text in texts]] += 4.0
    logits[tokenizer.eos] = 20.0
    return logits


def drawn_text(value, tokenizer, table, seed, longest=600):
    """The text of a grammar; its end is drawn too."""
    state, ids, logits = start_grammar(value, table), [], logits_of(tokenizer, seed)
    for position in range(longest):
        row = DrawRow(Sampling(seed=seed), position, mask=grammar_mask(state))
        token = int(draw(logits[None], draw_rows([row])).tokens)
        state = advance(state, token)
        if token == tokenizer.eos:
            return tokenizer.decode(ids)
        ids.append(token)
    raise AssertionError(f"no end: {tokenizer.decode(ids)[:300]}")


@pytest.mark.each_value
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_text_is_valid(schema, name, tokens):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: it says what is valid")
    for seed in range(2):
        text = drawn_text(Grammar.json(SCHEMAS[schema], compact=bool(seed)), *tokens[name], seed)
        # The library has a second 60 at any time, as RFC 3339 has it for some.
        checker = jsonschema.FormatChecker(["date", "uuid"])
        jsonschema.validate(json.loads(text), SCHEMAS[schema], format_checker=checker)


def test_without_the_mask_texts_are_not_valid(tokens, monkeypatch):
    tokenizer, table = tokens["fzero's bytes"]
    monkeypatch.setattr("test_grammar.grammar_mask", lambda state: torch.ones(256, dtype=torch.bool))
    with pytest.raises(ValueError, match="may not come here"):
        drawn_text(Grammar.json(SCHEMAS["a person"]), tokenizer, table, 0)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_regular_expressions_and_choices(name, tokens):
    tokenizer, table = tokens[name]
    pattern = r"[a-c]{2,4}-([0-9]{2}|é中)\n?"
    for seed in range(8):
        assert re.fullmatch(pattern, drawn_text(Grammar.regex(pattern), tokenizer, table, seed))
    choices = ["yes", "no", "no (.*)\n\\d+", '"é 中"', "yes, or no"]
    assert {drawn_text(Grammar.choices(choices), tokenizer, table, seed) for seed in range(40)} <= set(choices)
    for text in choices:
        ids = [int(i) for i in tokenizer.encode(text)]
        state = start_grammar(Grammar.choices(choices), table)
        if table.library.decode_str(ids) != text:  # pieces have a space before
            continue
        for token in ids:
            assert grammar_mask(state)[token]
            state = advance(state, token)
        assert state.accepting and grammar_mask(state)[tokenizer.eos]


def test_a_state_never_changes(tokens):
    tokenizer, table = tokens["fzero's bytes"]

    def allowed(state):
        return bytes(i for i in grammar_mask(state).nonzero()[:, 0].tolist() if i != tokenizer.eos)

    start = start_grammar(Grammar.choices(["abc", "abd", "xy"]), table)
    a, x = advance(start, ord("a")), advance(start, ord("x"))
    b = advance(a, ord("b"))
    assert [allowed(state) for state in (start, a, x, b, start)] == [b"ax", b"b", b"y", b"cd", b"ax"]
    whole = advance(b, ord("c"))
    assert (whole.accepting, whole.ended, b.accepting, b.ended) == (True, True, False, False)
    assert grammar_mask(whole).nonzero().tolist() == [[tokenizer.eos]]
    with pytest.raises(ValueError, match="the token 113 may not come here"):
        advance(b, ord("q"))
    assert allowed(b) == b"cd"


def test_a_tokenizer_of_transformers(tokens):
    from tokenizers import Tokenizer as Library
    from transformers import PreTrainedTokenizerFast

    library = Library.from_str(content_of("bytes"))
    fast = PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<|endoftext|>")
    tokenizer, table = tokens["bytes"]
    theirs = grammar_tokens(fast)
    value = Grammar.json(SCHEMAS["a person"])
    assert theirs.vocab_size == table.vocab_size
    assert torch.equal(grammar_mask(start_grammar(value, theirs)), grammar_mask(start_grammar(value, table)))
    another = grammar_tokens(fast, eos=(1, 3))
    end = start_grammar(Grammar.choices(["a"]), another)
    for token in tokenizer.encode("a"):
        end = advance(end, int(token))
    assert set(grammar_mask(end).nonzero()[:, 0].tolist()) == {0, 1, 3}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.json("{"), "grammar: the JSON schema: not JSON"),
        (lambda: Grammar.json([1]), r"the JSON schema is \[1\]; it must be an object"),
        (lambda: Grammar.choices([]), r"the choices are \[\]; they must be texts, at least one and none empty"),
        (lambda: Grammar.choices("ab"), "the choices are 'ab'; they must be texts"),
        (lambda: Grammar.choices(["a", ""]), "none empty"),
        (lambda: Grammar("lark", "x"), "grammar: kind is 'lark'; it must be one of json, regex, choices"),
    ],
)
def test_what_is_no_grammar_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Grammar.regex("[a-"), "grammar: regex.*unclosed character class"),
        (Grammar.json({"type": "arrays"}), "Invalid type: arrays"),
        (Grammar.json({"type": "array", "uniqueItems": True}), "uniqueItems"),
    ],
)
def test_what_the_library_refuses_is_said_in_a_line(value, message, tokens):
    with pytest.raises(ValueError, match=message) as caught:
        start_grammar(value, tokens["fzero's bytes"][1])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_text_that_the_tokenizer_cannot_write_is_refused(tokens):
    state = start_grammar(Grammar.regex("a\0"), tokens["fzero's bytes"][1])
    state = advance(state, ord("a"))
    with pytest.raises(ValueError, match="the tokenizer has no token for what must come next"):
        grammar_mask(state)


def test_a_tokenizer_that_is_none_and_a_missing_library_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"the tokenizer is a int; it must be one of fzero\.data"):
        monkeypatch.setattr(grammar, "_library", lambda: None)
        grammar_tokens(5)
    monkeypatch.undo()
    monkeypatch.setattr(
        packages.importlib, "import_module", lambda name: exec("raise ModuleNotFoundError(name='llguidance')")
    )
    monkeypatch.setattr(packages, "installed", lambda name: False)
    with pytest.raises(ValueError, match=r"^a grammar needs the package llguidance; pip install 'fzero\[grammar\]'$"):
        grammar_tokens(byte_tokenizer())


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize("drafted", [False, True])
def test_texts_of_a_grammar_are_the_same_with_guesses(drafted, tokens):
    tokenizer, table = tokens["pieces"]
    config = models.LlamaConfig(tokenizer.vocab_size, 160, 16, 2, 4, 2, 24, init_std=0.3)
    model = models.build(config)
    params = models.init_params(model, prng.key(1), torch.float64)
    sampling = Sampling(0.8, max_tokens=40, n=2)
    values = (Grammar.json(SCHEMA), Grammar.choices(["yes", "yes or no", "no"]), Grammar.regex("(ab|ba){12}"), None)
    prompts = [Prompt((5, 9, 2), sampling, number, grammar=value) for number, value in enumerate(values)]
    options = {"grammar_tokens": table, "decode": tokenizer.decode, "ends": (tokenizer.eos,), "page_tokens": 4}
    expected = list(completions(model, params, prompts, options=GenerateOptions(**options)))
    texts = [[5, 9, 2, *completion.ids] for completion in expected]

    def guess(ids, count):
        """What follows, and a wrong token."""
        text = next(text for text in texts if text[: len(ids)] == ids)
        return [*text[len(ids) :][: count - 1], 7]

    guesses = {"draft": Draft(model, params)} if drafted else {"guess": guess}
    out = completions(model, params, prompts, options=GenerateOptions(guesses=5, **guesses, **options))
    found = sorted((c.number, c.sample, c.ids, c.text, c.finish) for c in out)
    verified, right = out.guesses
    assert found == sorted((c.number, c.sample, c.ids, c.text, c.finish) for c in expected)
    assert right > 80 and (verified == right if drafted else right < verified < 140)  # 156 with forbidden ones


def test_a_wrong_guess_behind_which_nothing_can_be_drawn_is_no_error(tokens):
    """Behind "no" is its end alone, which min_tokens forbids."""
    model = models.build(models.LlamaConfig(256, 40, 16, 2, 4, 2, 24))
    params, sampling = models.init_params(model, prng.key(1)), Sampling(bias={ord("y"): 99.0}, min_tokens=5)
    prompt = Prompt((1,), sampling, grammar=Grammar.choices(["a no", "a yes sir"]))
    options = {"grammar_tokens": tokens["fzero's bytes"][1], "decode": lambda ids: bytes(ids).decode()}
    options = GenerateOptions(guesses=3, guess=lambda ids, count: tuple(b" no"), **options)
    assert next(completions(model, params, [prompt], options=options)).text == "a yes sir"
    with pytest.raises(ValueError, match="a guess has the token 256; the model has the ids 0 to 255"):
        list(completions(model, params, [prompt], options=replace(options, guess=lambda ids, count: [256])))

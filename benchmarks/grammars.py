"""llguidance beside xgrammar: fifty JSON schemas, the time to build each, of the mask of a token, and what fails.

    pip install llguidance xgrammar jsonschema
    python benchmarks/grammars.py --out benchmarks/results/grammars.json

Both draw texts by the same weights among the tokens that their masks allow, in turns, schema by schema; each text is
checked by jsonschema. Times are of the processor, which other programs do not lengthen. The tokenizer is a BPE of
32,000 tokens, trained on Python's library.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fzero.data.tokenizers import Tokenizer, train_bpe
from fzero.generate import grammar

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from grammar_schemas import SCHEMAS

Walk = Callable[[int], np.ndarray]  # from a token, or -1 for the first, to the mask of the next
Build = Callable[[dict[str, Any]], Callable[[], Walk]]  # from a schema to what starts a text


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """A BPE of Python's own library and the schemas."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*/*.py"))[:1500]
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    return train_bpe([*texts, *(json.dumps(schema, indent=2) for schema in SCHEMAS.values())], vocab_size)


def of_llguidance(tokenizer: Tokenizer) -> Build:
    """From a schema to its masks, as fzero has them."""
    tokens = grammar.grammar_tokens(tokenizer)

    def build(schema: dict[str, Any]) -> Callable[[], Walk]:
        start = grammar.start_grammar(grammar.Grammar.json(schema), tokens)

        def walk() -> Walk:
            state = start

            def mask(token: int) -> np.ndarray:
                nonlocal state
                if token >= 0:
                    state = grammar.advance(state, token)
                return grammar.grammar_mask(state).numpy()

            return mask

        return walk

    return build


def of_xgrammar(tokenizer: Tokenizer) -> Build:
    """The same by xgrammar, as its documents have it."""
    import xgrammar
    from tokenizers import Tokenizer as Library
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=Library.from_str(tokenizer.json), eos_token="<|endoftext|>")
    info = xgrammar.TokenizerInfo.from_huggingface(
        fast, vocab_size=tokenizer.vocab_size, stop_token_ids=[tokenizer.eos]
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def build(schema: dict[str, Any]) -> Callable[[], Walk]:
        compiled = compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        words = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)

        def walk() -> Walk:
            matcher = xgrammar.GrammarMatcher(compiled)

            def mask(token: int) -> np.ndarray:
                if token >= 0 and not matcher.accept_token(token):
                    raise ValueError(f"the token {token} is refused")
                matcher.fill_next_token_bitmask(words)
                bits = np.unpackbits(words.numpy().view(np.uint8)[0], count=tokenizer.vocab_size, bitorder="little")
                return bits.view(bool)

            return mask

        return walk

    return build


def draw_text(
    mask_of: Walk, tokenizer: Tokenizer, rng: random.Random, weights: np.ndarray
) -> tuple[list[int], list[float]]:
    """(ids, seconds of each mask) of a text, drawn by weights among the tokens allowed; at most 400 tokens."""
    ids, seconds, token = [], [], -1
    while len(ids) < 400:
        begin = time.thread_time()
        mask = mask_of(token)
        seconds.append(time.thread_time() - begin)
        allowed = np.flatnonzero(mask)
        token = int(rng.choices(allowed, weights[allowed])[0])
        if token == tokenizer.eos:
            break
        ids.append(token)
    return ids, seconds


def closing_weights(tokenizer: Tokenizer) -> np.ndarray:
    """Weights under which texts end: of tokens that close, and of short ones."""
    texts = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    weights = np.array([1.0 / (1 + len(text)) for text in texts])
    weights[[bool(text) and set(text) <= set('}]",:') for text in texts]] *= 3e4
    weights[tokenizer.eos] = 1e6
    return weights


def measure(
    name: str,
    schema: dict[str, Any],
    build: Build,
    tokenizer: Tokenizer,
    weights: np.ndarray,
    texts: int,
) -> dict[str, Any]:
    """The row of a schema and a library."""
    import jsonschema

    row: dict[str, Any] = {"schema": name, "problems": []}
    begin = time.thread_time()
    try:
        walk = build(schema)
    except Exception as error:  # a library's refusal is a result
        return {**row, "problems": [f"refused: {str(error).splitlines()[0][:160]}"]}
    row["build_ms"] = 1e3 * (time.thread_time() - begin)
    seconds: list[float] = []
    for number in range(texts):
        ids, more = draw_text(walk(), tokenizer, random.Random(number), weights)
        seconds += more
        text = tokenizer.decode(ids)
        try:
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
        except (ValueError, jsonschema.ValidationError) as error:
            kind = "unfinished" if len(ids) == 400 else f"invalid: {str(error).splitlines()[0][:100]}"
            row["problems"].append(kind)
    ordered = sorted(seconds)
    return {
        **row,
        "masks": len(ordered),
        "mask_us": 1e6 * statistics.median(ordered),
        "mask_us_of_100": 1e6 * ordered[int(0.99 * len(ordered))],
        "mask_us_sum": 1e6 * sum(ordered),
    }


def summary(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a library over all schemas."""
    done = [row for row in rows if "mask_us" in row]
    problems = [problem for row in rows for problem in row["problems"]]
    return {
        "contender": name,
        "build_ms": statistics.median(row["build_ms"] for row in done),
        "build_ms_most": max(row["build_ms"] for row in done),
        "mask_us": statistics.median(row["mask_us"] for row in done),
        "mask_us_mean": sum(row["mask_us_sum"] for row in done) / sum(row["masks"] for row in done),
        "mask_us_of_100": statistics.median(row["mask_us_of_100"] for row in done),
        "refused": sum(problem.startswith("refused") for problem in problems),
        "invalid": sum(problem.startswith("invalid") for problem in problems),
        "unfinished": sum(problem == "unfinished" for problem in problems),
    }


def main() -> None:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--texts", type=int, default=5, help="texts of each schema")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = train_tokenizer(args.vocab)
    weights, builders, start = closing_weights(tokenizer), {}, {}
    for name, make in (("llguidance", of_llguidance), ("xgrammar", of_xgrammar)):
        begin = time.thread_time()
        builders[name] = make(tokenizer)
        start[name] = time.thread_time() - begin
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in builders}
    for number, (schema_name, schema) in enumerate(SCHEMAS.items()):
        for name in sorted(builders, reverse=bool(number % 2)):
            rows[name].append(measure(schema_name, schema, builders[name], tokenizer, weights, args.texts))
    results = [{**summary(name, found), "tokenizer_s": start[name]} for name, found in rows.items()]
    for result in results:
        print(json.dumps(result))
    if args.out:
        versions = {name: __import__("importlib.metadata").metadata.version(name) for name in builders}
        head = {"machine": platform.machine(), "date": datetime.date.today().isoformat(), "versions": versions}
        command = " ".join(["python", *sys.argv])
        args.out.write_text(
            json.dumps(
                {
                    **head,
                    "command": command,
                    "vocab": args.vocab,
                    "texts": args.texts,
                    "results": results,
                    "schemas": rows,
                },
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()

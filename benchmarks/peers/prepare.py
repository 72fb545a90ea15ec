"""Text to tokens by another system, for benchmarks/prepare.py: `python prepare.py SYSTEM TEXTS TOKENIZER OUT WORKERS`.

Each reads the .jsonl files of the folder TEXTS, encodes documents with TOKENIZER (a tokenizer.json), ends each with
<|endoftext|>, and prints the number of tokens that it wrote.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

EOS = "<|endoftext|>"


@cache
def tokenizer_of(path: str) -> tuple[Any, int]:
    """The tokenizer of a file, and its id of the end of a document."""
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(path)
    return made, made.token_to_id(EOS)


def with_datatrove(texts: Path, tokenizer: str, out: Path, workers: int) -> int:
    """datatrove's reader and DocumentTokenizer, documents in their order."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    steps = [
        JsonlReader(str(texts)),
        DocumentTokenizer(str(out / "tokens"), tokenizer, eos_token=EOS, shuffle_documents=False),
    ]
    LocalPipelineExecutor(steps, tasks=workers, workers=workers, logging_dir=str(out / "log")).run()
    return sum(path.stat().st_size // 2 for path in (out / "tokens").glob("*.ds"))


def encode_batch(rows: dict[str, list[str]], tokenizer: str) -> dict[str, list[list[int]]]:
    """What `datasets.map` calls with some rows."""
    made, eos = tokenizer_of(tokenizer)
    return {"ids": [[*one.ids, eos] for one in made.encode_batch(rows["text"], add_special_tokens=False)]}


def with_datasets(texts: Path, tokenizer: str, out: Path, workers: int) -> int:
    """datasets' map with the tokenizers library, by batches."""
    import datasets

    rows: Any = datasets.load_dataset(
        "json", data_files=sorted(map(str, texts.glob("*.jsonl"))), split="train", cache_dir=str(out), num_proc=workers
    )
    kind = datasets.Features({"ids": datasets.List(datasets.Value("uint16"))})
    done = rows.map(
        partial(encode_batch, tokenizer=tokenizer),
        batched=True,
        num_proc=workers,
        remove_columns=["text"],
        features=kind,
    )
    return sum(len(part.chunk(i).flatten()) for part in [done.data["ids"]] for i in range(part.num_chunks))


def encode_file(path: str, tokenizer: str) -> Iterator[Any]:
    """What `litdata.optimize` calls with a file."""
    import torch

    made, eos = tokenizer_of(tokenizer)
    with open(path, encoding="utf-8") as file:
        for line in file:
            ids = made.encode(json.loads(line)["text"], add_special_tokens=False).ids
            yield torch.tensor([*ids, eos], dtype=torch.int32)


def with_litdata(texts: Path, tokenizer: str, out: Path, workers: int) -> int:
    """litdata's optimize, for its TokensLoader."""
    import litdata

    litdata.optimize(
        fn=partial(encode_file, tokenizer=tokenizer),
        inputs=sorted(map(str, texts.glob("*.jsonl"))),
        output_dir=str(out / "tokens"),
        chunk_bytes="64MB",
        num_workers=workers,
        item_loader=litdata.TokensLoader(block_size=1),
    )
    index = json.loads((out / "tokens" / "index.json").read_text())
    return sum(chunk["dim"] for chunk in index["chunks"])


SYSTEMS = {"datatrove": with_datatrove, "datasets": with_datasets, "litdata": with_litdata}

if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    system, texts, tokenizer, out, workers = sys.argv[1:]
    print("tokens", SYSTEMS[system](Path(texts), tokenizer, Path(out), int(workers)))

"""Every reader of files that others may have written: a folder with a sound file, the files to damage, and the read.

tests/test_foreign.py gives each the same list of hostile texts; tests/test_fuzz.py thousands of mutations."""

import dataclasses
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import reported
import torch
from law_cases import GPT_OSS

import fzero
from fzero.checkpoint import convert, huggingface, stored_state, verify
from fzero.checkpoint.convert.huggingface_families import FAMILIES
from fzero.checkpoint.convert.tensor_files import read_safetensors
from fzero.core import config_tables, prng
from fzero.data import json_tokenizer, load_tokenizer, open_tokens, prepare
from fzero.data.sources import find_files, read_documents
from fzero.kernels import tuning
from fzero.models import DeepSeekConfig, GPT2Config, LlamaConfig, MoEConfig, RopeScaling, build, init_params
from fzero.offload import LeafFiles, Nvme, disk_io
from fzero.planner import devices
from fzero.report import first_screen, report_writer
from fzero.run import from_table, machine, rollback, run_folder
from fzero.sharding import one_process

TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": 4,
            "content": "<|endoftext|>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "<|endoftext|>": 4},
        "merges": [["a", "b"]],
    },
}
LLAMA = LlamaConfig(61, 64, 16, 2, 2, 1, 24, rope_scaling=RopeScaling(4.0, 1.0, 4.0, 16))
GEMMA = {"norms": "both", "norm_offset": True, "activation": "gelu", "embed_scaled": True, "score_dim": 12}
GEMMA |= {"head_dim": 12}
MODELS = {
    "llama": LLAMA,
    "qwen2": LlamaConfig(61, 64, 16, 2, 2, 1, 24, qkv_bias=True),
    "qwen3": LlamaConfig(61, 64, 16, 2, 2, 1, 24, head_dim=12, qk_norm=True),
    "gpt2": GPT2Config(vocab_size=61, max_len=32, d_model=16, n_layers=2, n_heads=2, d_ff=32),
    "mixtral": MoEConfig(61, 64, 16, 2, 2, 1, 24, n_experts=2, top_k=1, pattern="window:8", z_coef=0.0),
    "deepseek_v3": DeepSeekConfig(
        61, 64, 16, 3, 1, 2, 6, 4, 4, 2, 4, 24, 4, 1, 1, 2, 1, 8, balance_coef=0.0, bias_rate=0.0
    ),
}
# Of a Llama or a Mixtral, whose readers are the same.
VARIATIONS = {
    "qwen3_moe": MoEConfig(61, 64, 16, 2, 2, 1, 24, head_dim=12, qk_norm=True, n_experts=2, top_k=1, z_coef=0.0),
    "gpt_oss": MoEConfig(61, 64, 16, 2, 2, 1, 24, n_experts=2, top_k=1, z_coef=0.0, **GPT_OSS),
    "mistral": LlamaConfig(61, 64, 16, 2, 2, 1, 24, pattern="window:8"),
    "smollm3": LlamaConfig(61, 64, 16, 2, 2, 1, 24, pattern="full,full@0"),
    "phi3": LlamaConfig(61, 64, 16, 2, 2, 1, 24, pattern="window:8"),
    "olmo2": LlamaConfig(61, 64, 16, 2, 2, 1, 24, norms="out", qk_norm=True, wide_qk_norm=True),
    "gemma2": LlamaConfig(61, 64, 16, 2, 2, 1, 24, pattern="window:8,full", score_cap=50.0, logit_cap=30.0, **GEMMA),
    "gemma3_text": LlamaConfig(61, 64, 16, 2, 2, 1, 24, pattern="window:8@10000,full", qk_norm=True, **GEMMA),
}


class Reader(NamedTuple):
    """make(folder): writes sound files. files: those to damage. read(folder): reads them. sign(path): corrects the
    checksum of a changed file, as somebody who means harm does."""

    make: Callable[[Path], None]
    files: tuple[str, ...]
    read: Callable[[Path], object]
    sign: Callable[[Path], None] = lambda path: None


def model_folder(name, **options):
    def make(folder):
        config = {**MODELS, **VARIATIONS}[name]
        params = init_params(build(config), prng.key(0))
        architecture = next(family.architecture for family in FAMILIES if family.model_type == name)
        huggingface.save_hf(folder / "model", config, params, architecture=architecture, **options)

    return make


def import_model(folder):
    source = convert.open_source(folder / "model")
    return [entry.give().shape for entry in source.leaves.values()]


def text_file(name, text):
    return lambda folder: (folder / name).write_text(text)


def make_corpus(folder):
    (folder / "t.txt").write_text("ab ab c. " * 50)
    (folder / "u.txt").write_text("c b a. " * 50)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    sources = [folder / "t.txt", folder / "u.txt"]
    prepare(sources, folder / "data", tokenizer=str(folder / "tokenizer.json"), val_fraction=0.5)


def read_corpus(folder):
    tokens = [open_tokens(folder / "data", split) for split in ("train", "val")]
    tokenizer = load_tokenizer(folder / "data")
    return tokenizer.decode(tokenizer.encode("abc")), [int(one.tokens.max()) for one in tokens]


def documents(name):
    def read(folder):
        return [one.text for one in read_documents(find_files([folder / name], folder), "text")]

    return read


def encode(folder):
    tokenizer = json_tokenizer((folder / "tokenizer.json").read_text(), "tokenizer.json")
    return tokenizer.decode(tokenizer.encode("abcab"))


LEAVES = {"w": torch.arange(12.0).reshape(4, 3), "n": torch.tensor(3)}


def make_checkpoint(folder):
    fzero.checkpoint.save(folder / "c", LEAVES, step=3, config={"lr": 0.1})


def read_checkpoint(folder):
    verify(folder / "c/step-00000003")
    return fzero.checkpoint.restore(
        folder / "c/step-00000003", {name: torch.empty_like(x) for name, x in LEAVES.items()}
    )


def sign_manifest(path):
    body = json.loads(path.read_text())
    body.pop("sha256", None)
    body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(body, indent=1))


def make_store(folder):
    nvme = Nvme(folder / "nvme")
    store = nvme.open({"params/w": LeafFiles((4, 3), torch.float32, False)}, one_process())
    store.begin()
    store.write_rows("params/w", 0, (0, 4), LEAVES["w"])
    store.flush()
    store.commit(1, {})
    store.finish()
    nvme.close()


def read_store(folder):
    snapshot = stored_state.find_snapshot(folder / "nvme")
    return snapshot and [
        snapshot.leaf(name, (4, 3), fzero.Spec.parse("[A, B]"))
        for name in snapshot.leaves
        if name.startswith("params/")
    ]


def sign_step(path):
    if path.name in ("step.json", "store.json"):
        body = json.loads(path.read_text())
        body.pop("sum", None)
        path.write_text(json.dumps({**body, "sum": zlib.crc32(json.dumps(body).encode())}))


def make_run(folder):
    reported.make_run(folder / "run", steps=6)
    back = {"step": 2, "to": 1, "sample": 8, "why": "it is a spike", "left_out": True}
    rollback.write_log(folder / "run", rollback.RollbackLog([[8, 4]], [16], None, 3, 1, [back]))
    run_folder.add_sample(folder / "run", 6, "def ", "def f(x):")


def read_run(folder):
    run = folder / "run"
    run_folder.read_config(run), run_folder.read_tokenizer(run), list(run_folder.read_metrics(run))
    run_folder.read_attempts(run), rollback.skips_of(run)
    report = report_writer.gather([run])
    return report_writer.to_markdown(report), first_screen.opening(report).parts[:2]


def make_report(folder):
    (folder / "report").mkdir()
    (folder / "report/report.json").write_text(
        report_writer.json_text(report_writer.gather([reported.make_run(folder / "run", steps=6)]))
    )


def make_device(folder):
    (folder / "fzero").mkdir()
    listed = devices.device("h100")
    curve = ((1, 1e-6), (1024, 1e-5))
    rates = devices.MeasuredRates(1, 1, curve, {"float32": ((1, 8, 8, 8, 1e-6),)}, {"rms_norm/float32": curve}, {}, {})
    about = {"processor": machine.processor()}
    measured = dataclasses.replace(listed, kind="cpu", measured=True, rates=(rates,), machine=about)
    (folder / "fzero/device.json").write_text(devices.to_json(measured))
    (folder / "fzero/listed.json").write_text(devices.to_json(listed))


def read_device(folder):
    devices.device(folder / "fzero/listed.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        machine.bench_rates()
        return devices.device("here")


def make_settings(folder):
    (folder / "fzero").mkdir()
    entry = "block_bytes = 1048576\nreaders = 2\nread_gbs = 1.5\nmeasured = 2026-01-01\n"
    (folder / "fzero/config.toml").write_text(f'[disk."{disk_io.mount_point(folder)}"]\n{entry}')


def read_settings(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        return disk_io.load_settings(folder)


def read_cache(folder):
    tuning._LOADED.pop(folder / "cache.json", None)
    return tuning._read(folder / "cache.json")


CONFIG = """preset = "llama-tiny"
zero = 3
offload = "opt=host"
mesh = {dp = 2, tp = 1}
[model]
d_model = 64
n_layers = 2
[model.rope_scaling]
factor = 2.0
[train]
steps = 20
batch = 8
micro_batch = 2
remat = "full"
[optim]
name = "adamw"
lr = 1e-3
[optim.schedule]
name = "wsd"
warmup_steps = 1
decay_steps = 2
[guard]
nonfinite = "skip"
"""
JSONL = "".join(json.dumps({"text": f"text {i} ab", "id": i, "meta": {"a": [1, None]}}) + "\n" for i in range(8))
READERS: dict[str, Reader] = {
    "config": Reader(
        text_file("run.toml", CONFIG), ("run.toml",), lambda d: from_table(config_tables.read_table(d / "run.toml"))
    ),
    "run": Reader(
        make_run,
        tuple(
            f"run/{x}"
            for x in (
                "config.json",
                "environment.json",
                "metrics.jsonl",
                "attempts.jsonl",
                "ledger.json",
                "memory.json",
                "plan.json",
                "skips.json",
                "samples.jsonl",
            )
        ),
        read_run,
    ),
    "report": Reader(
        make_report, ("report/report.json",), lambda d: report_writer.to_markdown(report_writer.gather([d / "report"]))
    ),
    **{
        f"hf-{name}": Reader(model_folder(name), ("model/config.json", "model/model.safetensors"), import_model)
        for name in (*MODELS, "gemma3_text")
    },
    "hf-shards": Reader(
        model_folder("llama", max_shard_bytes=8000),
        ("model/model.safetensors.index.json", "model/config.json"),
        import_model,
    ),
    "safetensors": Reader(
        model_folder("gpt2"),
        ("model/model.safetensors",),
        lambda d: [entry.give() for entry in read_safetensors(d / "model/model.safetensors").values()],
    ),
    "checkpoint": Reader(make_checkpoint, ("c/step-00000003/manifest.json",), read_checkpoint, sign_manifest),
    "store": Reader(make_store, ("nvme/store.json", "nvme/step.json"), read_store, sign_step),
    "jsonl": Reader(text_file("t.jsonl", JSONL), ("t.jsonl",), documents("t.jsonl")),
    "gz": Reader(
        lambda d: (d / "t.jsonl.gz").write_bytes(gzip.compress(JSONL.encode())),
        ("t.jsonl.gz",),
        documents("t.jsonl.gz"),
    ),
    "text": Reader(text_file("t.txt", "some text\n" * 9), ("t.txt",), documents("t.txt")),
    "corpus": Reader(
        make_corpus, tuple(f"data/{x}" for x in ("meta.json", "train.docs", "tokenizer.json")), read_corpus
    ),
    "tokenizer": Reader(text_file("tokenizer.json", json.dumps(TOKENIZER)), ("tokenizer.json",), encode),
    "device": Reader(make_device, ("fzero/device.json", "fzero/listed.json"), read_device),
    "settings": Reader(make_settings, ("fzero/config.toml",), read_settings),
    "tuning": Reader(text_file("cache.json", '{"k 1": {"BLOCK": 8}}'), ("cache.json",), read_cache),
}

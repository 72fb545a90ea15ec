"""Published training runs of other programs that fzero can plan: their settings, hardware and tokens per second.

A fact of a run's hardware that differs from the listed device (a slower network) stands in its row; nothing is fitted
to a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fzero.models.configs import ModelConfig, MoEConfig
from fzero.models.presets import GPT2Config
from fzero.sharding import pipeline

A3_NETWORK = 12.5e9  # bytes/s of a GPU: Google's a3-highgpu-8g, four interfaces of 200 Gb/s for eight GPUs


class Run(NamedTuple):
    """A published run: what it was, and its figures by GPU."""

    name: str
    source: str
    gpu: str
    model: str | ModelConfig
    mesh: dict[str, int]
    batch: int  # sequences of all ranks
    micro_batch: int
    seq_len: int
    remat: str
    compiled: bool
    tokens_per_s: float  # of a GPU
    zero: int = 3
    memory_gib: float | None = None
    network_bytes_s: float | None = None  # between nodes, of a GPU; None: as listed
    older: bool = False  # software of 2023 on Hopper, before its products and attention were tuned
    differs: str = ""
    settings: dict[str, Any] = {}  # noqa: RUF012  (more of the config, by dotted name; never written to)


def _mpt(d_model: int, n_layers: int, n_heads: int, seq_len: int) -> GPT2Config:
    """MosaicML's MPT without biases is planned as a GPT-2 with its sizes and vocabulary."""
    sizes = {"vocab_size": 50368, "max_len": seq_len, "d_ff": 4 * d_model}
    return GPT2Config(d_model=d_model, n_layers=n_layers, n_heads=n_heads, **sizes)


MPT = {
    "70b": (8192, 80, 64),
    "30b": (7168, 48, 56),
    "13b": (5120, 40, 40),
    "7b": (4096, 32, 32),
    "3b": (2560, 32, 20),
    "1b": (2048, 24, 16),
    "760m": (1536, 24, 12),
    "125m": (768, 12, 12),
}

# Of scripts/train/benchmarking/README.md of mosaicml/llm-foundry: size, length, GPUs, micro-batch, gradient
# accumulation, whether activations are recomputed, tokens/s of a GPU.
MOSAIC_A100 = [
    ("70b", 2048, 64, 8, 4, True, 410),
    ("30b", 2048, 8, 3, 21, True, 916),
    ("13b", 8192, 8, 5, 3, True, 1795),
    ("13b", 2048, 8, 2, 3, False, 2262),
    ("7b", 8192, 8, 8, 2, True, 3206),
    ("7b", 2048, 8, 6, 2, False, 4641),
    ("3b", 2048, 8, 10, 2, False, 10811),
    ("1b", 2048, 8, 14, 4, False, 20513),
    ("760m", 2048, 8, 24, 2, False, 32434),
    ("125m", 2048, 8, 32, 2, False, 141737),
]
MOSAIC_H100 = [
    ("70b", 2048, 64, 8, 4, True, 1039),
    ("30b", 2048, 32, 14, 3, True, 2308),
    ("13b", 4096, 8, 10, 3, True, 4717),
    ("13b", 2048, 64, 2, 1, False, 4800),
    ("7b", 32768, 8, 2, 2, True, 3318),
    ("7b", 2048, 8, 6, 1, False, 10643),
    ("3b", 8192, 8, 3, 6, False, 16578),
    ("1b", 2048, 64, 20, 1, False, 44402),
]


def _mosaic(gpu: str, rows: list[tuple[str, int, int, int, int, bool, int]]) -> list[Run]:
    source = "MosaicML, llm-foundry, benchmarking/README.md"
    differs = "ALiBi and no biases; activations are recomputed whole" if gpu == "a100" else "software of 2023"
    return [
        Run(
            f"mpt-{size}-{seq_len}-{ranks}-{gpu}",
            source,
            gpu,
            _mpt(*MPT[size], seq_len),
            {"dp": ranks},
            batch=ranks * micro * times,
            micro_batch=micro,
            seq_len=seq_len,
            remat="full" if again else "none",
            compiled=False,
            tokens_per_s=tokens,
            older=gpu == "h100",
            differs=differs,
        )
        for size, seq_len, ranks, micro, times, again, tokens in rows
    ]


def _llm_c() -> list[Run]:
    common = {
        "source": "llm.c on 8 H100",
        "gpu": "h100",
        "mesh": {"dp": 8},
        "zero": 1,
        "seq_len": 1024,
        "remat": "none",
        "compiled": True,
        "differs": "C and CUDA without Python; cuDNN's attention",
    }
    return [
        Run("gpt2-124m", model="gpt2-124m", batch=512, micro_batch=64, tokens_per_s=468e3, **common),
        Run("gpt2-1.5b", model="gpt2-1.5b", batch=1024, micro_batch=16, tokens_per_s=48.5e3, **common),
    ]


# torchtitan recomputes every second product, in order (from memory of its source): of a layer those of keys, of the
# attention's output and of one half of the gated units, 37% of its products' FLOPs. What is kept here is the fraction
# of bytes with which as many FLOPs are recomputed: 0.65 PFLOP of a step of 16 sequences (`fzero plan --vary remat=`).
EVERY_SECOND = "selective:0.35"
# torchtitan's configuration: one scale a tensor, found in each call, and weights gathered in float8.
FLOAT8 = {"precision.policy": "bf16_float8_gather"}


def _titan_h100() -> list[Run]:
    common = {
        "gpu": "h100-500w",
        "model": "llama-8b",
        "micro_batch": 2,
        "seq_len": 8192,
        "remat": EVERY_SECOND,
        "differs": "keeps whole float32 logits; its memory is what the allocator reserved",
    }
    source = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table"
    rows = [
        ("llama-8b-8", 1, 8, False, 5762, 82.4, {}),
        ("llama-8b-8-compiled", 1, 8, True, 6667, 77.0, {}),
        ("llama-8b-8-float8", 1, 8, True, 8532, 76.8, FLOAT8),
        ("llama-8b-128", 3, 128, False, 5605, 67.0, {}),
        ("llama-8b-128-compiled", 3, 128, True, 6514, 62.0, {}),
        ("llama-8b-128-float8", 3, 128, True, 8380, 61.8, FLOAT8),
    ]
    return [
        Run(
            name,
            f"{source} {table}",
            mesh={"dp": ranks},
            batch=2 * ranks,
            compiled=compiled,
            tokens_per_s=tokens,
            memory_gib=memory,
            settings=settings,
            **common,
        )
        for name, table, ranks, compiled, tokens, memory, settings in rows
    ]


def _titan_a100() -> list[Run]:
    common = {
        "gpu": "a100",
        "mesh": {"dp": 64},
        "source": "torchtitan, docs/performance.md (May 2024)",
        "compiled": True,
        "differs": "between its nodes RDMA of a speed that is not said; whether compiled is not said",
    }
    rows = [
        ("llama-8b-a100", "llama-8b", 64, 1, 8192, EVERY_SECOND, 2973),
        ("llama-70b-a100", "llama-70b", 64, 1, 8192, "full", 331),
        ("llama2-13b-a100", "llama2-13b", 128, 2, 4096, "none", 2162),
        ("llama2-13b-a100-selective", "llama2-13b", 128, 2, 4096, EVERY_SECOND, 1904),
        ("llama2-70b-a100", "llama2-70b", 128, 2, 4096, "full", 353),
    ]
    return [
        Run(
            name,
            model=model,
            batch=batch,
            micro_batch=micro,
            seq_len=seq_len,
            remat=remat,
            tokens_per_s=tokens,
            **common,
        )
        for name, model, batch, micro, seq_len, remat, tokens in rows
    ]


def _maxtext() -> list[Run]:
    # Its TFLOP/s count 6 N and causal attention, 6 L T D; Llama 2 7B has 6.738e9 parameters.
    flop = 6 * 6.738e9 + 6 * 32 * 4096 * 4096
    common = {"gpu": "h100", "model": "llama2-7b", "micro_batch": 4, "seq_len": 4096, "remat": "none"}
    return [
        Run(
            f"llama2-7b-maxtext-{8 * nodes}",
            "MaxText, configs/a3/llama_2_7b/README.md",
            mesh={"dp": 8, "rp": nodes} if nodes > 1 else {"dp": 8},
            batch=32 * nodes,
            compiled=True,
            tokens_per_s=tflops * 1e12 / flop,
            network_bytes_s=A3_NETWORK,
            differs="XLA; cuDNN's attention; it recomputes what lies between products",
            **common,
        )
        for nodes, tflops in ((1, 492), (2, 422), (4, 407), (8, 409), (16, 375))
    ]


def _fms() -> list[Run]:
    source = "IBM, foundation-model-stack/fms-fsdp, README.md"
    common = {"seq_len": 4096, "differs": "whether compiled is not said; its nodes' network neither"}
    node = {"dp": 8, "rp": 16}
    none, a100 = {"remat": "none"}, {"gpu": "a100", "compiled": False, "source": source}
    return [
        Run("llama2-7b-fms-h100", f"{source} (May 2024, as issue 89 has it)", "h100", "llama2-7b", node, batch=256,
            micro_batch=2, compiled=True, tokens_per_s=9600, **none, **common),
        Run("llama2-7b-fms", model="llama2-7b", mesh=node, batch=256, micro_batch=2, tokens_per_s=3760, **none, **a100,
            **common),
        Run("llama2-13b-fms", model="llama2-13b", mesh=node, batch=128, micro_batch=1, tokens_per_s=1700, **none,
            **a100, **common),
        Run("llama2-70b-fms", model="llama2-70b", mesh={"dp": 128}, batch=768, micro_batch=6, tokens_per_s=380,
            remat="full", **a100, **common),
    ]  # fmt: skip


def _megatron() -> list[Run]:
    # 4 sequences of 2048 tokens in 1.10 s on 8 GPUs.
    model = GPT2Config(d_model=6144, n_layers=48, n_heads=64, d_ff=4 * 6144, vocab_size=51200, max_len=2048)
    differs = "attention without a fused kernel, recomputed; sequence parallelism"
    return [
        Run("megatron-22b", "Korthikanti et al. 2022, table 5", "a100", model, {"tp": 8}, batch=4, micro_batch=4,
            seq_len=2048, remat="none", compiled=False, tokens_per_s=4 * 2048 / 1.10 / 8, zero=0, differs=differs),
    ]  # fmt: skip


def runs() -> list[Run]:
    """The published runs that fzero can plan."""
    named = [*_llm_c(), *_titan_h100(), *_titan_a100(), *_maxtext(), *_fms(), *_megatron()]
    return [*named, *_mosaic("a100", MOSAIC_A100), *_mosaic("h100", MOSAIC_H100)]


def _megatron_pipelines() -> list[Run]:
    # Narayanan et al. 2021, table 1: GPUs, ranks of pp, sequences of a batch, TFLOP/s of a GPU. These count what is
    # computed with all activations recomputed: 96 B s l h^2 (1 + s / 6h + V / 16 l h), section 5.1.
    rows = [
        ("gpt-145b", 80, 12288, 1536, 8, 2304, 148),
        ("gpt-310b", 96, 16384, 1920, 16, 2160, 155),
        ("gpt-530b", 105, 20480, 2520, 35, 2520, 163),
        ("gpt-1t", 128, 25600, 3072, 64, 3072, 163),
    ]
    differs = (
        "attention without a fused kernel; interleaved with chunks that are not said, here 1f1b; micro-batches of 1"
    )
    return [
        Run(
            f"{model}-pp{pp}",
            "Narayanan et al. 2021 (SC21), table 1",
            "a100",
            model,
            {"pp": pp, "dp": gpus // pp // 8, "tp": 8},
            batch=batch,
            micro_batch=1,
            seq_len=2048,
            remat="full",
            compiled=False,
            tokens_per_s=tflops * 1e12 / (96 * layers * d**2 * (1 + 2048 / (6 * d) + 51200 / (16 * layers * d))),
            zero=0,
            differs=differs,
        )
        for model, layers, d, gpus, pp, batch, tflops in rows
    ]


def _llama_pipelines() -> list[Run]:
    # Grattafiori et al. 2024, table 4: 43% and 41% of 989 TFLOP/s with 8 x 16 ranks of tp and pp, 16 M tokens a batch.
    # Counted here as 6 N and causal attention, 6 L T D; the paper does not say.
    flop = 6 * 405.85e9 + 6 * 126 * 8192 * 16384
    layout = ",".join(map(str, (1, *[2] * 62, 1)))  # the first and the last stage have a layer less, section 3.3.2
    differs = (
        "its chunks are of one layer, the first and the last of none; here of two and one. Its gradients, sharded over "
        "dp, are summed once a step here. The whole inputs of products are kept, not gathered again over tp"
    )
    return [
        Run(
            f"llama-405b-pp16-{gpus}",
            "Grattafiori et al. 2024 (Llama 3), table 4",
            "h100",
            "llama-405b",
            {"pp": 16, "dp": gpus // 128, "tp": 8},
            batch=2048,
            micro_batch=1,
            seq_len=8192,
            remat="none",
            compiled=True,
            tokens_per_s=tflops * 1e12 / flop,
            zero=1,
            differs=differs,
            settings={
                "sequence": True,
                "pipeline.schedule": "interleaved",
                "pipeline.chunks": 4,
                "pipeline.layout": layout,
            },
        )
        for gpus, tflops in ((8192, 430), (16384, 400))
    ]


def _zero_bubble() -> list[Run]:
    # Qi et al. 2023, tables 3 and 4: samples/s of a GPU and its GB with 24 micro-batches on 8 GPUs of a node, whose
    # first and last stage have a layer less. ZB-1p has the memory of 1f1b, as zb-h1; its order is found by a search.
    rows = [
        ("1.5b", 22, 2304, 24, 6, "2,3,3,3,3,3,3,2", {"1f1b": (11.8, 30), "zb-h1": (12.9, 32)}),
        ("6.2b", 30, 4096, 32, 3, "3,4,4,4,4,4,4,3", {"1f1b": (3.50, 39), "zb-h1": (3.88, 42)}),
    ]
    differs = "Megatron-LM's kernels, whose attention keeps its scores and their dropout; ZB-1p for zb-h1"
    return [
        Run(
            f"zb-{size}-{name.replace('-', '')}",
            "Qi et al. 2023 (zero bubble), table 4",
            "a100",
            GPT2Config(vocab_size=50304, max_len=1024, d_model=d, n_layers=layers, n_heads=heads, d_ff=4 * d),
            {"pp": 8},
            batch=24 * micro,
            micro_batch=micro,
            seq_len=1024,
            remat="none",
            compiled=False,
            tokens_per_s=samples * 1024,
            zero=0,
            memory_gib=gb * 1e9 / 2**30,
            differs=differs,
            settings={"pipeline.schedule": name, "pipeline.layout": layout},
        )
        for size, layers, d, heads, micro, layout, found in rows
        for name, (samples, gb) in found.items()
    ]


def scores_bytes(run: Run) -> int:
    """The bytes that the fullest rank of a zero-bubble run keeps of attention without a fused kernel: of each pair of
    positions and head the softmax and its dropout, 2 bytes each, and the mask, 1 (Korthikanti et al. 2022, equation 2),
    for the layers in flight."""
    assert isinstance(run.model, GPT2Config)
    stages = pipeline.read_layout(run.settings["pipeline.layout"], [1.0] * run.model.n_layers, run.mesh["pp"])
    s = pipeline.schedule(run.settings["pipeline.schedule"], stages, run.batch // run.micro_batch)
    chunks = pipeline.play(s, dict.fromkeys("FIW", 1.0)).peak
    layers = max(n * len(stages.layers[rank]) for rank, n in enumerate(chunks))
    return layers * 5 * run.model.n_heads * run.seq_len**2 * run.micro_batch


def pipelines() -> list[Run]:
    """The published runs with pp that fzero can plan."""
    return [*_megatron_pipelines(), *_llama_pipelines(), *_zero_bubble()]


def _experts() -> list[Run]:
    # Megatron-Core's README of its mixture of experts (commit 022bcb5): 468 TFLOP/s of a GPU for Mixtral 8x7B, and the
    # mapping of its table: EP 8, PP 4 with 8 chunks, 64 GPUs, batches of 256. Counted as 6 N of the parameters in use
    # and 12 L T D of attention, as Megatron-LM counts them; N without the embedding.
    mixtral = 468e12 / (6 * 12.748e9 + 12 * 32 * 4096 * 4096)
    # DeepSeek-AI 2024, sections 1 and 3.2: 180 K hours of an H800 for 1 T tokens on 2,048 of them, 16 ranks of pp, 64
    # of ep over 8 nodes, ZeRO-1; batches of 15,360 sequences of 4,096 tokens; float8 products.
    deepseek = 1e12 / (180e3 * 3600)
    # Jin et al. 2025, table 3: 1.41 M tokens/s on 1,440 GPUs, 1.88 times those of Megatron-LM; 60 layers of 32 experts,
    # of which a token uses 3, 15 ranks of pp, batches of 720 sequences of 8,192. Sizes written from memory.
    sizes = {"d_model": 4096, "n_layers": 60, "n_heads": 32, "n_kv_heads": 8, "d_ff": 14336, "vocab_size": 65536}
    megascale = MoEConfig(**sizes, max_len=8192, n_experts=32, top_k=3)
    once = {"zero": 1, "compiled": True, "micro_batch": 1}
    return [
        Run("mixtral-8x7b-pp4", "Megatron-Core, megatron/core/transformer/moe/README.md", "h100", "mixtral-8x7b",
            {"pp": 4, "dp": 2, "ep": 8}, batch=256, seq_len=4096, remat="none", tokens_per_s=mixtral,
            settings={"pipeline.schedule": "interleaved", "pipeline.chunks": 8}, **once,
            differs="Transformer Engine's grouped products"),
        Run("deepseek-v3-pp16", "DeepSeek-AI 2024 (DeepSeek-V3), sections 1, 3 and 4.2", "h800", "deepseek-v3",
            {"pp": 16, "dp": 2, "ep": 64}, batch=15360, seq_len=4096, remat="none", tokens_per_s=deepseek,
            settings={"pipeline.schedule": "dualpipe-v", "pipeline.chunks": 2, "precision.policy": "bf16_float8"},
            **once, differs="experts in float8 too; a token goes to 4 nodes at most; messages beside computation"),
        Run("megascale-352b-pp15", "Jin et al. 2025 (MegaScale-MoE), table 3: Megatron-LM", "h800", megascale,
            {"pp": 15, "dp": 3, "ep": 4, "tp": 8}, batch=720, seq_len=8192, remat="none",
            tokens_per_s=1.41e6 / 1.88 / 1440, settings={"sequence": True}, **once,
            differs="its mapping of Megatron-LM is not said"),
    ]  # fmt: skip


def experts() -> list[Run]:
    """The published runs with experts over ep that fzero can plan."""
    return _experts()


LEFT_OUT = {
    "torchtitan tables 5 and 6": "context parallelism; interleaved schedules whose chunks are not said",
    "zero-bubble's 1F1B-I": "a chunk is a layer there, and the first and the last one have none",
    "zero-bubble's ZB-2p": "its order is found by a search, and it updates before the norm of all stages is known; "
    "zb-h2, with as much memory, idles 11% and 7% of a step where it idles 4% and 0.3% (its table 5)",
    "Llama 3's row of 131,072 tokens on cp=16": "not planned; how its FLOPs of attention are counted, which are "
    "more than half there, is not said",
    "zero-bubble's rows of 14.6B and 28.3B": "their stages do not fill a node, whose links between nodes are not said",
    "torchtitan tables 2 and 4": "float8 products with asynchronous tensor parallelism; context parallelism",
    "Megatron-LM on H100 (41 to 48% MFU)": "its sizes and meshes are in a picture",
    "DeepSpeed ZeRO-2 on H200 (47% causal MFU)": "published without batch, mesh or recomputation",
}

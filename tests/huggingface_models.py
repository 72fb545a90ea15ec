"""Tiny random models of transformers, their batches and tasks, for the tests of from_huggingface."""

import torch
import transformers as hf
from torch.overrides import TorchFunctionMode

ROWS, T, V = 4, 8, 64
TRUNK = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES = {**TRUNK, "num_key_value_heads": 2, "max_position_embeddings": 32}
WINDOWS = {**SIZES, "head_dim": 8, "sliding_window": 4}
MODELS = {
    "Llama": lambda: hf.LlamaConfig(**SIZES),
    "Qwen2": lambda: hf.Qwen2Config(**SIZES),
    "Qwen3": lambda: hf.Qwen3Config(**SIZES, head_dim=8),
    "Gemma2": lambda: hf.Gemma2Config(**WINDOWS),
    "Gemma3": lambda: hf.Gemma3TextConfig(**{**WINDOWS, "num_hidden_layers": 6}),
    "Mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=4),
    "Phi3": lambda: hf.Phi3Config(**SIZES, pad_token_id=0),
    "Olmo2": lambda: hf.Olmo2Config(**SIZES, pad_token_id=0),
    "GPTNeoX": lambda: hf.GPTNeoXConfig(**TRUNK, max_position_embeddings=32),
    "GPT2": lambda: hf.GPT2Config(vocab_size=V, n_embd=16, n_layer=3, n_head=4, n_positions=32),
    "OPT": lambda: hf.OPTConfig(
        vocab_size=V, hidden_size=16, ffn_dim=32, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=16
    ),
    "Bloom": lambda: hf.BloomConfig(vocab_size=V, hidden_size=16, n_layer=3, n_head=4),
    "Falcon": lambda: hf.FalconConfig(vocab_size=V, hidden_size=16, num_hidden_layers=3, num_attention_heads=4),
    "SmolLM3": lambda: hf.SmolLM3Config(**SIZES, pad_token_id=0),
    "DeepSeek-V3": lambda: hf.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        moe_intermediate_size=8,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        qk_nope_head_dim=4,
        first_k_dense_replace=1,
    ),
    "Qwen3-MoE": lambda: hf.Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
    ),
    "Mixtral": lambda: hf.MixtralConfig(**SIZES, num_local_experts=4),
    "gpt-oss": lambda: hf.GptOssConfig(**WINDOWS, num_local_experts=4, num_experts_per_tok=2),
    "BERT": lambda: hf.BertConfig(**TRUNK, max_position_embeddings=32),
    "ViT": lambda: hf.ViTConfig(
        **{name: size for name, size in TRUNK.items() if name != "vocab_size"},
        image_size=8,
        patch_size=4,
        num_labels=5,
    ),
    "T5": lambda: hf.T5Config(
        vocab_size=V,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=3,
        num_decoder_layers=4,
        num_heads=4,
        decoder_start_token_id=0,
    ),
}
TASKS = {"BERT": "masked", "RoBERTa": "masked", "DistilBERT": "masked"}
# Those that drop by functions of torch, attention's probabilities among them, with transformers' own rates.
DROPPING = {
    **{name: MODELS[name] for name in ("BERT", "GPT2", "T5", "OPT")},
    "RoBERTa": lambda: hf.RobertaConfig(**TRUNK, max_position_embeddings=32, pad_token_id=0),
    "DistilBERT": lambda: hf.DistilBertConfig(
        vocab_size=V, dim=16, hidden_dim=32, n_layers=3, n_heads=4, max_position_embeddings=32
    ),
    "BART": lambda: hf.BartConfig(
        vocab_size=V,
        d_model=16,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **{f"{side}_layers": 3 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    ),
}


def batch_of(name, seed):
    """A batch with padding, and labels that do not count: half of them in every row, so that ranks have as many."""
    g = torch.Generator().manual_seed(seed)
    if name == "ViT":
        images = torch.randn(ROWS, 3, 8, 8, generator=g, dtype=torch.float64)
        return {"pixel_values": images, "labels": torch.randint(0, 5, (ROWS,), generator=g)}
    tokens = torch.randint(1, V, (ROWS, T), generator=g)
    labels, there = tokens.clone(), torch.ones_like(tokens)
    labels[:, :2], labels[1, 5:], there[1, 5:] = -100, -100, 0
    return {"input_ids": tokens, "attention_mask": there, "labels": labels}


class Widened(TorchFunctionMode):
    """Computes in float64 what the code of a model asks for in float32, such as norms, so that a comparison shows
    mistakes of the order of 1e-10, which rounding to float32 hides."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        args, kwargs = tuple(map(widened, args)), {key: widened(value) for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def widened(value):
    return torch.float64 if value is torch.float32 else value

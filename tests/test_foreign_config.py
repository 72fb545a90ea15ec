"""Every number of a foreign config.json is checked once, by bounds and types and against the weights; and so are the
sizes of a model that a user writes."""

import dataclasses
import json
import math
import re
import time

import pytest
from foreign_cases import MODELS, VARIATIONS, model_folder

from fzero import models
from fzero.checkpoint import huggingface, read_hf_config
from fzero.checkpoint.convert.huggingface_families import FAMILIES, REQUIRED
from fzero.core import prng
from fzero.models import BOUNDS, RopeScaling
from fzero.run import from_table

ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# What no entry may be. 0 and fractions are left to each entry's bounds.
WRONG = (-1, 10**30, True, "1", [1], {"a": 1}, math.nan, math.inf, -0.5)
ZERO_IS_FINE = {"resid_pdrop", "embd_pdrop", "initializer_range", "router_aux_loss_coef"}
ZERO_IS_FINE |= {"first_k_dense_replace", "q_lora_rank", "n_shared_experts", "routed_scaling_factor"}
ENTRIES = [
    *((family.model_type, field.entry) for family in FAMILIES for field in family.fields),
    *((family.model_type, "rope_theta") for family in FAMILIES[1:]),
    *(("llama", f"rope_scaling.{name}") for name in ROPE),
    *(("llama", f"rope_parameters.{name}") for name in (*ROPE, "rope_theta")),
    ("mixtral", "sliding_window"),
]


ALL = {**MODELS, **VARIATIONS}


def case(model, *rest):
    """A variation of a Llama is slow."""
    return pytest.param(model, *rest, marks=[pytest.mark.slow] * (model in VARIATIONS))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name in ALL:
        made[name] = tmp_path_factory.mktemp(name)
        model_folder(name)(made[name])
    return made


def changed(folder, entry, value):
    """The config.json of a model with one entry of another value, in a folder beside it."""
    table = json.loads((folder / "model/config.json").read_text())
    place, _, name = entry.rpartition(".")
    (table[place] if place else table)[name] = value
    path = folder / "changed.json"
    path.write_text(json.dumps(table))
    return path


@pytest.mark.parametrize(("model", "entry"), [case(*both) for both in ENTRIES])
def test_every_number_is_refused_by_name_where_it_cannot_compute(folders, model, entry):
    name = entry.rpartition(".")[2]
    truth = name in ("tie_word_embeddings", "norm_topk_prob")
    for value in (*WRONG, *(() if name in ZERO_IS_FINE else (0,))):
        if truth and isinstance(value, bool):
            continue
        with pytest.raises(
            ValueError, match=rf"changed\.json: .*{name}|changed\.json: .*sliding|changed\.json: .*window"
        ):
            read_hf_config(changed(folders[model], entry, value))


def test_the_sound_configs_are_read(folders):
    for name, config in ALL.items():
        assert read_hf_config(folders[name] / "model/config.json")[0] == config
    for family in FAMILIES:  # the table above has every entry that must be there
        assert {f.entry for f in family.fields if f.default is REQUIRED} <= {
            e for m, e in ENTRIES if m == family.model_type
        }


@pytest.mark.parametrize("model", [case(model) for model in ALL])
def test_every_size_is_compared_with_the_weights(folders, model):
    from fzero.checkpoint import convert

    family = next(f for f in FAMILIES if f.model_type == model)
    table = json.loads((folders[model] / "model/config.json").read_text())
    free = {
        "layer_norm_epsilon",
        "rms_norm_eps",
        "initializer_range",
        "tie_word_embeddings",
        "resid_pdrop",
        "embd_pdrop",
    }
    free |= {"norm_topk_prob", "router_aux_loss_coef", "num_experts_per_tok", "max_position_embeddings"}
    free |= {"routed_scaling_factor", "topk_group", "n_group"}
    free |= {"query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping"}
    free |= {"n_head"}  # any divisor of n_embd makes the same tensors
    for field in family.fields:
        if field.entry not in free and table.get(field.entry) is not None:
            for factor in (2, 50_000):
                path = changed(folders[model], field.entry, table[field.entry] * factor)
                begin = time.monotonic()
                with pytest.raises(ValueError):
                    convert.open_source(folders[model] / "model", path)
                assert time.monotonic() - begin < 2, (field.entry, factor)


def test_a_billion_layers_are_refused_before_memory_is_taken(folders, tmp_path):
    from fzero.checkpoint import convert

    begin = time.monotonic()
    for value, message in ((10**9, "num_hidden_layers is 1000000000; it must be at least 1 and below 100000"),
                           (99_999, r"asks for 899,994 tensors and 21 are there")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            convert.open_source(folders["llama"] / "model", changed(folders["llama"], "num_hidden_layers", value))
    path = changed(folders["mixtral"], "num_local_experts", 99_999)
    table = json.loads(path.read_text())
    path.write_text(json.dumps({**table, "num_hidden_layers": 99_999}))
    with pytest.raises(ValueError, match=r"tensors and .* are there"):
        convert.open_source(folders["mixtral"] / "model", path)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("config", [*MODELS.values(), models.MLPConfig()], ids=lambda config: type(config).__name__)
def test_the_sizes_of_a_model_have_bounds_wherever_they_come_from(config):
    for name in (name for name in BOUNDS if name in vars(config)):
        low, included, high = BOUNDS[name]
        wrong = [low - 1, *([] if included else [low]), math.nan, *([high] if high < math.inf else []), math.inf]
        for value in wrong:
            with pytest.raises(ValueError, match=rf"{name} is {re.escape(repr(value))}; it must be"):
                type(config)(**{**vars(config), name: value})
    with pytest.raises(ValueError, match=r"a leaf of n_layers=99999, .* has more elements than memory can address"):
        type(config)(**{**vars(config), "n_layers": 99_999, "d_model": 999_936, "d_ff": 99_999_999})


@pytest.mark.parametrize(
    "table",
    [{"factor": 0.0}, {"factor": 0.5}, {"low_freq_factor": 4.0}, {"high_freq_factor": 1.0}, {"original_max_len": 0}],
)
def test_a_scaling_of_rope_that_divides_by_zero(table):
    with pytest.raises(
        ValueError, match=rf"{next(iter(table))} is .*; it must be|high_freq_factor is .*; it must be above"
    ):
        RopeScaling(**table)
    with pytest.raises(ValueError, match="must be"):
        from_table({"preset": "llama-tiny", "model": {"rope_scaling": table}})


@pytest.mark.parametrize(
    "table",
    [
        {"model": {"n_layers": 10**9}},
        {"model": {"max_len": 2**62}},
        {"train": {"batch": 2**62, "micro_batch": 3}},
        {"train": {"batch": 999_999_999_989, "micro_batch": 7}},
        {"mesh": {"dp": 2**62}},
        {"data": {"seq_len": 2**40}},
    ],
    ids=str,
)
def test_a_run_of_impossible_sizes_is_refused_at_once(table):
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"; it must be|; the axes are|does not divide"):
        from_table({"preset": "llama-tiny", **table})
    assert time.monotonic() - begin < 10


PUBLISHED = {"_name_or_path": "some", "torch_dtype": "bfloat16", "use_cache": False, "unsloth_version": "2026.1"}
PUBLISHED |= {"is_causal": True, "eos_token_id": [1, 2], "bos_token_id": 10**30, "new_entry": None, "use_mrope": False}
# Of one family, as its published folders have them.
PUBLISHED_OF = {
    "gpt2": {"n_ctx": 32, "summary_type": "cls_index", "task_specific_params": {"a": 1}, "hidden_size": 16},
    "llama": {"pretraining_tp": 1, "rope_interleaved": False, "is_llama_config": True, "sliding_window": None},
    "qwen2": {"use_mrope": False, "sliding_window": 8, "use_sliding_window": False, "max_window_layers": 28},
    "qwen3_moe": {"intermediate_size": 99, "max_window_layers": 28, "output_router_logits": False},
    "smollm3": {"max_window_layers": 28, "pretraining_tp": 2, "transformers.js_config": {"dtype": "q4"}},
    "phi3": {"auto_map": {"AutoConfig": "a.B"}, "original_max_position_embeddings": 4096, "attention_bias": False},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"},
    "gemma3_text": {"cache_implementation": "hybrid", "_sliding_window_pattern": 6},
    "mixtral": {"output_router_logits": False, "num_experts": 2},
    "gpt_oss": {"experts_per_token": 1, "initial_context_length": 4096, "output_router_logits": False},
    "deepseek_v3": {"aux_loss_alpha": 0.001, "ep_size": 1, "seq_aux": True, "num_nextn_predict_layers": 1},
}


def with_entries(folder, **entries):
    """The config of a model's folder with other entries in its config.json; ... takes one out."""
    table, path = json.loads((folder / "model/config.json").read_text()) | entries, folder / "entries.json"
    path.write_text(json.dumps({name: value for name, value in table.items() if value is not ...}))
    return read_hf_config(path)[0]


@pytest.mark.parametrize("model", [case(model) for model in ALL])
def test_every_entry_is_used_or_changes_nothing_or_is_refused_by_name(folders, model):
    assert with_entries(folders[model], **(PUBLISHED | PUBLISHED_OF.get(model, {}))) == ALL[model]
    for entries, said in (
        ({"is_causal": False}, "is_causal is False; fzero supports True only"),
        ({"is_causal": None}, "is_causal is None"),  # which transformers takes for false
        ({"per_layer_config": {"0": {}}}, r"per_layer_config is \{'0': \{\}\}"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"residual_multiplier": 0.5}, "residual_multiplier is 0.5"),
        ({"some_bias": True}, "some_bias is True.*does not know what that changes in a"),
    ):
        with pytest.raises(ValueError, match=said):
            with_entries(folders[model], **entries)


def test_both_spellings_of_rope_must_say_the_same(folders):
    linear, new = {"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}

    def read(new, old=..., theta=...):
        found = with_entries(folders["llama"], rope_parameters=new, rope_scaling=old, rope_theta=theta)
        return found.rope_theta, found.rope_scaling

    scaled = (50.0, RopeScaling.linear(2.0))
    assert read(new) == read(..., linear, 50.0) == read(new, {**linear, "rope_theta": 50.0}) == scaled
    plain = {"rope_type": "default", "rope_theta": 1e4}
    for tables, said in (
        ((plain, linear), "rope_type is 'linear' in rope_scaling and 'default' in rope_parameters; RoPE must be"),
        ((new, linear), "rope_theta is 10000.0 in rope_scaling and 50.0 in rope_parameters"),
        (({**new, "type": "yarn"},), "rope_type is 'linear' and type 'yarn'; leave one out"),
        (({**new, "low_freq_factor": 1.0},), "the linear rope scaling has low_freq_factor, which"),
        ((new, ..., 1e4), "rope_theta of RoPE is both 10000.0 and 50.0"),
        ((..., ..., None), "rope_theta is None; it must be a finite number"),
    ):
        with pytest.raises(ValueError, match=said):
            read(*tables)


def test_deepseek_has_one_epsilon_in_all_norms(folders, tmp_path):
    with pytest.raises(ValueError, match="rms_norm_eps is 1e-05; DeepSeek-V3 of transformers has 1e-06 in its norms"):
        with_entries(folders["deepseek_v3"], rms_norm_eps=1e-5)
    config = dataclasses.replace(MODELS["deepseek_v3"], norm_eps=1e-5)
    with pytest.raises(ValueError, match="norm_eps is 1e-05; DeepSeek-V3 of transformers has"):
        huggingface.save_hf(tmp_path / "out", config, models.init_params(models.build(config), prng.key(0)))


@pytest.mark.slow
def test_rope_of_gemma_3_is_read_as_transformers_reads_it(folders):
    whole, near = {"rope_type": "default", "rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e4}
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}

    def read(new, old=...):
        return with_entries(folders["gemma3_text"], rope_parameters=new, rope_scaling=old, rope_theta=...).rope_scaling

    assert read({"full_attention": whole, "sliding_attention": near}) is None
    assert read({"full_attention": yarn, "sliding_attention": near}).kind == "yarn_whole"
    for tables, said in (
        ((whole,), "rope_parameters has no full_attention and sliding_attention"),
        ((..., {"type": "linear", "factor": 2.0}), "RoPE has type 'linear'; Gemma 3 has it by the name rope_type"),
        (({"full_attention": {**yarn, "truncate": False}, "sliding_attention": near},), "truncate of RoPE is False"),
        (({"full_attention": whole, "sliding_attention": near, "factor": 2.0},), "rope_parameters has factor beside"),
    ):
        with pytest.raises(ValueError, match=said):
            read(*tables)

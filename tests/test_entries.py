"""Entries of config.json and adapter_config.json that other programs wrote: each is used, is known to change nothing,
or is refused by name. The reference is what transformers and peft compute from the same file."""

import copy
import json
import random
import warnings

import pytest
import torch
from hf_cases import CASES, LLAMA3, YARN, hf, relative, save, theirs, tokens
from safetensors.torch import load_file

from fzero.checkpoint.convert import peft
from fzero.checkpoint.convert.huggingface import load_hf
from fzero.checkpoint.convert.huggingface_entries import OFF, UNUSED
from fzero.checkpoint.convert.huggingface_families import FAMILIES
from fzero.core import pytree
from fzero.models import Ctx, build, logits

# A case of each family.
KINDS = {
    next(f.model_type for f in FAMILIES if f.architecture.startswith(CASES[case][0])): case
    for case in reversed(CASES)
    if case != "gemma3"
}
KINDS["gemma3_text"] = "gemma3"
VALUES = (None, True, False, 0, 1, 2, 3, 7, -1, 0.5, 1.0, 2.0, "silu", "gelu", "default", [], {}, [1, 0], 1e4)
ROPES = (
    {"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}, LLAMA3, YARN, {}, None,
    {"rope_type": "default", "rope_theta": 50.0}, {"type": "yarn", **LLAMA3}, {"rope_type": "default", "factor": 2.0},
    {**YARN, "truncate": False}, {**YARN, "attention_factor": 2.0}, {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}, {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "dynamic", "factor": 2.0}, {"type": "linear", "factor": 2.0, "rope_theta": None},
    {"full_attention": {"rope_theta": 50.0}, "sliding_attention": {"rope_theta": 20.0}},
)  # fmt: skip
LAYERS = (["full_attention"] * 2, ["sliding_attention", "full_attention"], ["sliding_attention"] * 4, None)


def entries_of(table, rng, most):
    """Changed files of a config.json, each (what was done, the file)."""
    names = {*table, *OFF, *UNUSED, "per_layer_config", "attention_chunk_size", "rope_theta", "rope_local_base_freq"}
    names |= {field.theirs for family in FAMILIES for field in family.fields} | {
        name
        for family in FAMILIES
        for name in (*family.fixed, *(also for field in family.fields for also in field.also))
    }
    names -= {"architectures", "model_type", "dtype", "torch_dtype", "quantization_config", "num_labels", "id2label"}
    names -= {"label2id", "return_dict", "problem_type", "output_attentions", "_attn_implementation"}
    found = [(f"without {name}", {n: v for n, v in table.items() if n != name}) for name in sorted(names & set(table))]
    for name in sorted(names):
        special = LAYERS if name == "layer_types" else VALUES
        found += [(f"{name} = {value}", {**table, name: value}) for value in special if value != table.get(name, ...)]
    for name in ("rope_scaling", "rope_parameters"):
        for value in ROPES:
            found.append((f"{name} = {value}", {**table, name: value}))
            found.append((f"{name} = {value} alone", {"rope_theta": 30.0, **without_rope(table), name: value}))
            found.append((f"{name} = {value} beside", {**table, name: value, "original_max_position_embeddings": 8}))
    return found if most is None else rng.sample(found, most)


def without_rope(table):
    return {name: value for name, value in table.items() if not name.startswith("rope_")}


def their_logits(table, weights, ids):
    """The logits of transformers by a config.json, None where it cannot compute any."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = hf.AutoConfig.for_model(**copy.deepcopy(table))  # which it changes
            model = hf.AutoModelForCausalLM.from_config(config).eval()
            missing, extra = model.load_state_dict(weights, strict=False)
            if missing and not (config.tie_word_embeddings and missing == ["lm_head.weight"]):
                return None
            return None if extra else model(input_ids=ids).logits.detach()
    except Exception:
        return None


def weights_for_module(model):
    return {name: leaf.clone() for name, leaf in model.state_dict().items()}


FUZZED = [
    *(pytest.param(kind, 16, marks=pytest.mark.slow) for kind in KINDS),
    *(pytest.param(kind, None, marks=pytest.mark.exhaustive) for kind in KINDS),
]


@pytest.mark.parametrize(("kind", "most"), FUZZED)
def test_a_changed_config_gives_the_logits_of_transformers_or_is_refused(kind, most, tmp_path):
    model = theirs(KINDS[kind])
    folder = save(model, tmp_path / "model")
    table, weights, ids = json.loads((folder / "config.json").read_text()), weights_for_module(model), tokens(2)
    computed, silent = 0, []
    for what, changed in entries_of(table, random.Random(f"0 {kind}"), most):
        (folder / "config.json").write_text(json.dumps(changed))
        try:
            config, params = load_hf(folder)
        except ValueError as error:
            assert "\n" not in str(error)
            continue
        with torch.no_grad():
            expected = their_logits(changed, weights, ids)
            if expected is None:
                continue
            computed += 1
            error = relative(logits(build(config), params, {"tokens": ids}, Ctx()), expected)
        if not error < 1e-4:
            silent.append(f"{what}: {error:.1e}")
    assert not silent, "\n".join(silent)
    assert computed >= (3 if most else 100)


# ---- adapter_config.json ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """(the folder of a base, that of an adapter of it by PEFT, whose factors are drawn)."""
    library = pytest.importorskip("peft")
    place = tmp_path_factory.mktemp("adapted")
    model = theirs("llama")
    save(model, place / "base")
    config = library.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM"
    )
    with_factors = library.get_peft_model(model, config)
    with torch.no_grad():
        for name, leaf in with_factors.named_parameters():
            if "lora_B" in name:
                leaf.normal_(0.0, 0.3)
    with_factors.save_pretrained(place / "adapter")
    return place / "base", place / "adapter"


ABOUT = {
    "init_lora_weights": (True, False, "gaussian", "pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "loftq",
                          "lora_ga", "eva", "orthogonal", "mica", "unknown", None),
    "loftq_config": ({}, {"loftq_bits": 4, "loftq_iter": 1}), "corda_config": ({"corda_method": "kpm"},),
    "lora_ga_config": ({"stable_gamma": 16},), "eva_config": ({"rho": 2.0},), "arrow_config": ({"top_k": 1},),
    "alora_invocation_tokens": ([1, 2], []), "use_dora": (True, False), "use_rslora": (True, False),
    "use_qalora": (True,), "use_bdlora": ({"nblocks": 2},), "velora_config": ({"num_groups": 2},),
    "kasa_config": ({"beta": 1.0},), "monteclora_config": ({},), "layer_replication": ([[0, 2], [1, 2]],),
    "rank_pattern": ({"q_proj": 2}, {}), "alpha_pattern": ({"q_proj": 2}, {"nothing": 2}), "bias": ("all", "lora_only"),
    "lora_alpha": (1, 12.5, None), "r": (2, 8, None), "lora_dropout": (0.5, 0.0), "fan_in_fan_out": (True, False),
    "layers_to_transform": ([0], 1, []), "layers_pattern": ("layers", ["layers"]), "modules_to_save": (["lm_head"], []),
    "exclude_modules": (["v_proj"], "model.layers.0.*", ["nothing"], []), "lora_bias": (True, False),
    "target_modules": (["q_proj"], ["q_proj", "v_proj"], ["q_proj", "v_proj", "up_proj", "k_proj"], "all-linear",
                       r".*(q|v|up)_proj", r"(q|v|up)_proj", ["q_proj", "v_proj", "up_proj", "lm_head"], None, []),
    "target_parameters": (["model.layers.0.mlp.up_proj.weight"],), "trainable_token_indices": ([1],),
    "task_type": ("SEQ_CLS", None), "inference_mode": (False,), "megatron_config": ({"a": 1},), "revision": ("main",),
    "ensure_weight_tying": (True,), "qalora_group_size": (8,), "peft_version": ("9",), "a_new_entry": (None, True, 3),
    "runtime_config": ({"ephemeral_gpu_offload": True},), "auto_mapping": ({"a": "b"},),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_changed_adapter_gives_the_logits_of_peft_or_is_refused(adapted, tmp_path):
    library = pytest.importorskip("peft")
    base, adapter = adapted
    about, ids = json.loads((adapter / "adapter_config.json").read_text()), tokens(2)
    module, weights = theirs("llama"), load_file(base / "model.safetensors")
    config, params = load_hf(base)
    changes = [(f"without {name}", {n: v for n, v in about.items() if n != name}) for name in about]
    changes += [(f"{name} = {value}", {**about, name: value}) for name, values in ABOUT.items() for value in values]
    computed, refused, silent = [], [], []
    for i, (what, changed) in enumerate(changes):
        folder = copy_adapter(adapter, tmp_path / str(i), changed)
        try:
            opened = peft.open_adapter(folder, base, config)
        except ValueError as error:
            refused.append(what)
            assert "\n" not in str(error) and str(folder) in str(error)
            continue
        named = pytree.named_leaves(params) | {name: entry.give() for name, entry in opened.leaves.items()}
        model = build(opened.config)
        filled = model.init(lambda name, *shape, named=named, **options: named[name])
        with torch.no_grad():
            module.load_state_dict(weights, strict=False)
            try:
                wrapped = library.PeftModel.from_pretrained(module, folder).eval()
                expected = wrapped(input_ids=ids).logits
                module = wrapped.unload()
            except Exception:  # a file that PEFT cannot load
                module = theirs("llama")
                continue
            error = relative(logits(model, filled, {"tokens": ids}, Ctx()), expected)
        computed.append(what)
        if not error < 1e-5:
            silent.append(f"{what}: {error:.1e}")
    assert not silent, "\n".join(silent)
    assert "lora_dropout = 0.5" in computed and len(computed) > 30 and len(refused) > 40, (computed, refused)


def copy_adapter(adapter, to, about):
    to.mkdir()
    (to / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    (to / "adapter_config.json").write_text(json.dumps(about))
    return to

"""Entries of config.json and adapter_config.json that other programs wrote: each is used, is known to change nothing,
or is refused by name. The reference is what transformers and peft compute from the same file."""

import copy
import dataclasses
import functools
import json
import random
import warnings

import pytest
import torch
from hf_cases import CASES, LLAMA3, YARN, hf, relative, save, theirs, tokens
from safetensors.torch import load_file

from fzero.checkpoint import huggingface, peft
from fzero.checkpoint.convert.huggingface_entries import OFF, UNUSED
from fzero.checkpoint.convert.huggingface_families import FAMILIES
from fzero.core import pytree
from fzero.models import Ctx, LlamaConfig, build, logits
from fzero.run import weights

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


def entries_of(table, known, rng, most):
    """Changed files of a config.json, each (what was done, the file); known: the entries that its class knows."""
    names = {
        *table,
        *known,
        *OFF,
        *UNUSED,
        "per_layer_config",
        "attention_chunk_size",
        "rope_theta",
        "rope_local_base_freq",
    }
    names |= {field.entry for family in FAMILIES for field in family.fields} | {
        name
        for family in FAMILIES
        for name in (*family.fixed, *(also for field in family.fields for also in field.aliases))
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
    known = {*model.config.to_dict(), *model.config.attribute_map}
    for what, changed in entries_of(table, known, random.Random(f"0 {kind}"), most):
        (folder / "config.json").write_text(json.dumps(changed))
        try:
            config, params = huggingface.load_hf(folder)
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


def adapted(place, **kind):
    """(the folder of a base, that of an adapter of it by PEFT, whose factors are drawn)."""
    library = pytest.importorskip("peft")
    model = theirs("llama")
    save(model, place / "base")
    config = library.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM", **kind
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


ADAPTERS = [pytest.param({}, False, marks=pytest.mark.slow)]
ADAPTERS += [
    pytest.param(kind, True, marks=pytest.mark.exhaustive)
    for kind in ({}, {"use_dora": True}, {"use_rslora": True}, {"init_lora_weights": "pissa"},
                 {"init_lora_weights": "olora"})
]  # fmt: skip


@pytest.mark.parametrize(("kind", "whole"), ADAPTERS)
@pytest.mark.filterwarnings("ignore")
def test_a_changed_adapter_gives_the_logits_of_peft_or_is_refused(kind, whole, tmp_path):
    """whole: with every one of VALUES for each entry that PEFT knows."""
    library = pytest.importorskip("peft")
    base, adapter = adapted(tmp_path, **kind)
    about, ids = json.loads((adapter / "adapter_config.json").read_text()), tokens(2)
    module, weights = theirs("llama"), load_file(base / "model.safetensors")
    config, params = huggingface.load_hf(base)
    changes = [(f"without {name}", {n: v for n, v in about.items() if n != name}) for name in about]
    changes += [(f"{name} = {value}", {**about, name: value}) for name, values in ABOUT.items() for value in values]
    names = [field.name for field in dataclasses.fields(library.LoraConfig)] if whole else []
    changes += [(f"{name} = {value}", {**about, name: value}) for name in names for value in VALUES]
    computed, refused, silent = [], [], []
    for i, (what, changed) in enumerate(changes):
        folder = copy_adapter(adapter, tmp_path / str(i), changed)
        try:
            opened = peft.open_adapter(folder, base, config)
        except ValueError as error:
            refused.append(what)
            assert "\n" not in str(error) and str(folder) in str(error)
            continue
        base_leaves = pytree.named_leaves(params)
        named = base_leaves | peft.adapter_leaves(opened, base_leaves)
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
        if not error < 5e-4:  # with lora_alpha 1e4 the product is far larger than the weights
            silent.append(f"{what}: {error:.1e}")
    assert not silent, "\n".join(silent)
    assert "lora_dropout = 0.5" in computed and len(computed) > 30 and len(refused) > 40, (computed, refused)


def copy_adapter(adapter, to, about):
    to.mkdir()
    (to / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    (to / "adapter_config.json").write_text(json.dumps(about))
    return to


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize(
    ("case", "change"),
    [("llama", {}), ("llama", {"use_rslora": True}), ("llama", {"use_dora": True}), ("llama", {"r": 1}),
     ("qwen2", {}), ("gpt2", {})],
)  # fmt: skip
def test_an_adapter_whose_start_is_taken_out_of_the_base_is_peft_s(case, init, change, tmp_path):
    """As PEFT saves and loads it, and as it is written again: plain, for the base as it is."""
    library = pytest.importorskip("peft")
    modules = ["c_proj", "c_fc"] if case == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    save(theirs(case), tmp_path / "base")
    about = {"r": 3, "lora_alpha": 7, "target_modules": modules, "init_lora_weights": init, "task_type": "CAUSAL_LM"}
    if case == "gpt2" and init != "pissa":  # whose factors have the shapes of the turned weight there
        about["target_modules"] = ["attn.c_proj"]
    with_factors = library.get_peft_model(theirs(case), library.LoraConfig(**{**about, **change}))
    with torch.no_grad():
        for name, leaf in with_factors.named_parameters():
            if "lora_" in name:
                leaf.add_(torch.randn_like(leaf), alpha=0.1)  # as if trained
    with_factors.save_pretrained(tmp_path / "adapter")
    ids = tokens(2)

    def logits_of_peft(folder):
        with torch.no_grad():
            return library.PeftModel.from_pretrained(theirs(case), folder).eval()(input_ids=ids).logits

    config, params = huggingface.load_hf(tmp_path / "base")
    expected = logits_of_peft(tmp_path / "adapter")
    opened = peft.open_adapter(tmp_path / "adapter", tmp_path / "base", config)
    named = pytree.named_leaves(params)
    named |= peft.adapter_leaves(opened, named)
    model = build(opened.config)
    filled = model.init(lambda name, *shape, **options: named[name])
    # To rounding, however near two singular values are: what is decomposed is the same matrix.
    assert relative(logits(model, filled, {"tokens": ids}, Ctx()), expected) < 5e-6
    assert "rank" in opened.notes[0] and opened.config.rank == 2 * {**about, **change}["r"]
    peft.save_adapter(tmp_path / "again", opened.config, filled, base=str(tmp_path / "base"))
    assert relative(logits_of_peft(tmp_path / "again"), expected) < 1e-4


def test_a_start_by_random_numbers_is_refused_with_the_reason(tmp_path):
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**about, "init_lora_weights": "pissa_niter_4"}))
    with pytest.raises(ValueError, match=r"'pissa_niter_4'; .*by random numbers, another model at each load: let PEFT"):
        peft.open_adapter(tmp_path, tmp_path, None)


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize("transposed", [True, False])
def test_what_is_taken_out_of_the_base_is_a_product_of_its_rank(init, transposed, tmp_path):
    draw = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(2, *shape, generator=draw) for shape in ((6, 5), (6, 2), (2, 5)))
    entries = {
        f"w_lora_{name}": peft.TensorEntry(leaf.dtype, tuple(leaf.shape), lambda leaf=leaf: leaf)
        for name, leaf in zip("ab", (a, b), strict=True)
    }
    config = peft.LoRAConfig(LlamaConfig(), 4, 12.0, "w")
    adapter = peft.Adapter(config, entries, [], {"w": transposed}, init, tmp_path)
    leaves = peft.adapter_leaves(adapter, {"w": weight})
    found = weight + 3.0 * leaves["w_lora_a"] @ leaves["w_lora_b"] - 3.0 * a @ b
    if init == "pissa":  # the best product of rank 2 is gone: of five singular values three are left
        sizes = torch.linalg.svdvals(weight)
        torch.testing.assert_close(torch.linalg.svdvals(found)[:, :3], sizes[:, 2:])
    else:  # 3.0 times the first columns of Q with the first rows of R
        stored = weight.mT if transposed else weight
        q, r = torch.linalg.qr(stored)
        expected = stored - 3.0 * q[..., :2] @ r[..., :2, :]
        torch.testing.assert_close(found, expected.mT if transposed else expected)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_base_of_which_rounding_decides_what_is_taken_out_is_refused_with_the_remedy(init, tmp_path):
    """Where its singular values or its columns do not stand apart, PEFT takes out another product on each machine."""
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(8, 8, generator=draw, dtype=torch.float64))[0] for _ in range(2))
    entries = {
        f"w_lora_{name}": peft.TensorEntry(torch.float32, shape, functools.partial(torch.zeros, shape))
        for name, shape in (("a", (1, 8, 2)), ("b", (1, 2, 8)))
    }
    adapter = peft.Adapter(peft.LoRAConfig(LlamaConfig(), 4, 4.0, "w"), entries, [], {"w": True}, init, tmp_path)

    def taken(gap):
        """Of a weight, stored as [out, in], of which the second direction stands apart from the next by gap."""
        if init == "pissa":
            sizes = torch.tensor([3.0, 1.0 + gap, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
            weight = (left * sizes) @ right
        else:
            weight = left.clone()
            weight[:, 1] = weight[:, 0] + gap * weight[:, 1]
        stored = weight.float()
        leaves = peft.adapter_leaves(adapter, {"w": stored.mT[None]})
        return leaves["w_lora_a"] @ leaves["w_lora_b"], weight

    for gap in (1e-1, 1e-3):
        found, weight = taken(gap)
        if init == "pissa":
            u, s, v = torch.linalg.svd(weight)
            expected = (u[:, :2] * s[:2]) @ v[:2]
        else:
            q, r = torch.linalg.qr(weight)
            expected = q[:, :2] @ r[:2]
        torch.testing.assert_close(-found[0].double().mT, expected, rtol=0, atol=1e-6 / gap)
    for gap in (1e-5, 0.0):
        with pytest.raises(
            ValueError, match=r"adapter_config.json: .*all but (equal|dependent).*for_weight_conversion"
        ):
            taken(gap)
    peft.adapter_leaves(adapter, {"w": torch.zeros(1, 8, 8)})  # nothing is taken out of nothing


QKV = ("q_proj", "v_proj", "down_proj")
WRITTEN = (  # (a base, the modules, what else is asked of PEFT): None where fzero takes the file, else what it says
    ("llama", QKV, {"use_dora": True, "use_rslora": True}, None),
    ("gpt2", ("c_fc", "c_proj"), {"use_dora": True}, None),
    ("llama", QKV, {"exclude_modules": r".*\.v_proj"}, None),
    ("llama", QKV, {"init_lora_weights": "orthogonal"}, None),
    ("llama", QKV, {"loftq_config": {"loftq_bits": 4}}, None),
    ("llama", ("self_attn.q_proj", "layers.0.mlp.down_proj", "layers.1.mlp.down_proj"), {}, None),
    ("deepseek", ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj"), {}, None),
    ("gpt2", ("c_attn",), {}, "c_attn, of which fzero has the parts apart"),
    ("phi3", ("gate_up_proj",), {}, "gate_up_proj, of which fzero has the parts apart"),
    ("llama", (*QKV, "embed_tokens"), {}, "of an embedding, a head"),
    ("gpt2", ("wte", "c_fc"), {}, "of an embedding, a head.*lora_embedding_A; its embedding is its head too, and PEFT"),
    ("qwen2-tied", (*QKV, "lm_head"), {}, "of an embedding, a head.*; its embedding is its head too, and PEFT"),
    ("llama", (*QKV, "lm_head"), {}, "of an embedding, a head"),
    ("qwen2-tied", (*QKV, "embed_tokens"), {"ensure_weight_tying": True}, "tying is True; fzero has False alone$"),
    ("llama", QKV, {"modules_to_save": ["lm_head", "embed_tokens"]}, "modules_to_save is"),
    ("llama", QKV, {"rank_pattern": {r"layers\.0\..*q_proj": 2}}, "rank_pattern is"),
    ("llama", QKV, {"alpha_pattern": {"v_proj": 3}}, "alpha_pattern is"),
    ("llama", QKV, {"layers_to_transform": [1]}, "layers_to_transform is"),
    ("llama", QKV, {"exclude_modules": r"model\.layers\.0\..*"}, "or of some layers alone: .* for 1 of the 2 layers"),
    ("llama", QKV, {"trainable_token_indices": [1, 2]}, "trainable_token_indices is"),
    ("mixtral", ("q_proj",), {"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters is"),
    ("qwen2", ("q_proj",), {"lora_bias": True}, "lora_bias is True"),
    ("qwen2", ("q_proj",), {"bias": "lora_only"}, "bias is 'lora_only'"),
    ("llama", QKV, {"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens is .*None alone$"),
    ("llama", QKV, {"layer_replication": [[0, 2], [1, 2]]}, r"layer_replication is .*None alone$"),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("case", "modules", "kind", "said"), WRITTEN)
def test_what_peft_writes_gives_its_logits_or_is_refused_with_a_remedy_that_serves(case, modules, kind, said, tmp_path):
    """An adapter of each kind, all of it changed as if trained; refused, the folder that PEFT merges it to is taken."""
    library = pytest.importorskip("peft")
    module = theirs(case)
    base = save(module, tmp_path / "base")
    about = {"r": 4, "lora_alpha": 6, "target_modules": list(modules), "task_type": "CAUSAL_LM", **kind}
    trained = library.get_peft_model(module, library.LoraConfig(**about))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for leaf in trained.parameters():
            if leaf.requires_grad:
                leaf.add_(torch.randn(leaf.shape, generator=draw), alpha=0.05)
    trained.peft_config["default"].base_model_name_or_path = str(base)
    trained.save_pretrained(tmp_path / "adapter")
    ids = tokens(2)
    loaded = library.PeftModel.from_pretrained(
        hf.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "adapter"
    ).eval()
    with torch.no_grad():
        expected = loaded(input_ids=ids).logits
    start = tmp_path / "adapter"
    if said is not None:
        with pytest.raises(ValueError, match=said) as error:
            weights.load_start(start)
        assert "\n" not in str(error.value)
        if peft.MERGE not in str(error.value):
            return
        start = tmp_path / "merged"
        loaded.merge_and_unload().save_pretrained(start)
    found = weights.load_start(start)
    with torch.no_grad():
        error = relative(logits(found.model, found.params, {"tokens": ids}, Ctx()), expected)
    assert error < 1e-5

"""Models from and to `transformers` (checkpoint/convert/): it is the independent implementation of GPT-2, Llama,
Qwen and Mixtral."""

import copy
import dataclasses
import json
import re
import shutil

import pytest
import ranks
import torch
from close import assert_close, assert_same
from hf_cases import (
    CASES,
    CLASS,
    EXHAUSTIVE,
    GPT_OSS,
    LLAMA3,
    OURS,
    SLOW,
    V,
    copy_of,
    hf,
    relative,
    save,
    theirs,
    tokens,
)
from safetensors.torch import load_file, save_file
from zero_cases import whole

import fzero
from fzero import local_batch, optim, state_specs
from fzero.checkpoint import huggingface
from fzero.checkpoint.convert.tensor_files import DTYPES, read_safetensors, write_safetensors
from fzero.core import pytree
from fzero.models import Ctx, GPT2Config, MLPConfig, build, logits, loss, num_params, preset

every_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW) + [pytest.mark.exhaustive] * (case in EXHAUSTIVE))
        for case in CASES
    ],
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """case -> (their model, the folder it was saved to), each made once."""
    made = {}

    def get(case):
        if case not in made:
            model = theirs(case)
            made[case] = model, save(model, tmp_path_factory.mktemp(case) / "model")
        return made[case]

    return get


ROUTED = ("Mixtral", "Qwen3Moe", "GptOss")  # their loss has a part that balances the experts
ROUTER = "e_score_correction_bias"  # a buffer of theirs, a leaf of ours


def batch_of(ids):
    """Next-token targets as transformers takes them: the last position has none."""
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, -1] = False
    return {"tokens": ids, "targets": ids.roll(-1, 1), "mask": mask}


@every_case
def test_logits_loss_and_every_gradient_equal_theirs(case, saved, tmp_path):
    model, folder = saved(case)
    config, params = huggingface.load_hf(folder)
    kind = CASES[case][0]
    assert type(config) is OURS[kind]
    ours = build(config)
    ids = tokens(3)
    with torch.no_grad():
        assert relative(logits(ours, params, {"tokens": ids}, Ctx()), model(input_ids=ids).logits) < 1e-5

    # One sequence: transformers takes the auxiliary loss of the whole batch, fzero of each sequence.
    ids = ids[:1] if kind in ROUTED else ids
    model = copy.deepcopy(model)
    out = model(
        input_ids=ids, labels=ids, use_cache=False, **({"output_router_logits": True} if kind in ROUTED else {})
    )
    out.loss.backward()

    def mean_loss(params):
        total, num_tokens = loss(ours, params, batch_of(ids), Ctx())[:2]
        return total / num_tokens

    grads, value = torch.func.grad_and_value(mean_loss)(params)
    expected_loss = float(out.loss.detach())
    assert abs(float(value) - expected_loss) < 1e-5 * expected_loss
    if kind in ROUTED:
        assert float(out.aux_loss.detach()) > 0.1  # it is part of what is compared

    # Their gradients, saved as a model's weights, come through the same tables.
    named = {name: p.grad.contiguous() for name, p in model.named_parameters()}
    named |= {name: torch.zeros_like(b) for name, b in model.named_buffers() if ROUTER in name}
    graded = copy_of(folder, tmp_path / "grads")
    save_file(named, graded / "model.safetensors")
    expected = pytree.named_leaves(huggingface.load_hf(graded)[1])
    got = pytree.named_leaves(grads)
    assert list(got) == list(expected) == list(huggingface.meta_leaves(config))
    errors = {name: relative(got[name], expected[name]) for name in got if expected[name].abs().max() > 1e-6}
    # A key's bias moves all scores of a query alike: its gradient is zero but for rounding, in both.
    assert set(got) - set(errors) <= {"blocks/attn/b_k", "blocks_experts/moe/bias"}
    assert max(errors.values()) < 1e-5, errors


def five_steps(mesh, folder, ids):
    """Whole parameters after five steps at stage 3 from the weights in `folder`, and the losses."""
    config, params = huggingface.load_hf(folder)
    model, tx = build(config), optim.sgd(0.05, 0.9)
    plan = fzero.zero_plan(3, model, mesh)
    state, step = fzero.init_state(params, tx, plan, seed=0), fzero.make_train_step(model, tx, plan)
    losses = []
    for _ in range(5):
        state, metrics = step(state, local_batch(batch_of(ids), mesh))
        losses.append(float(metrics.loss))
    return whole(state, state_specs(plan, tx), mesh).params, losses


@pytest.mark.slow
@pytest.mark.parametrize("case, sizes", [("gemma2", {"dp": 2}), ("gemma3", {"tp": 2}), ("olmo2", {"tp": 2})])
def test_five_steps_on_two_ranks_are_those_of_transformers(case, sizes, saved):
    model, folder = saved(case)
    model, ids = copy.deepcopy(model).train(), tokens(2)
    sgd, expected = torch.optim.SGD(model.parameters(), 0.05, 0.9), []
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        expected.append(float(loss.detach()))
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    params, losses = ranks.run(2, five_steps, folder, ids, mesh=sizes)[0]
    assert_close(losses, expected, rtol=1e-5)
    assert expected[4] < 0.98 * expected[0]
    after = save(model, folder.parent / f"{folder.name}-after")
    wanted = pytree.named_leaves(huggingface.load_hf(after)[1])
    assert max(relative(leaf, wanted[name]) for name, leaf in pytree.named_leaves(params).items()) < 1e-5


@every_case
def test_what_we_export_transformers_loads_with_the_same_logits(case, saved, tmp_path):
    model, folder = saved(case)
    config, params = huggingface.load_hf(folder)
    ids = tokens(2)
    for name, shard_bytes in (("whole", 10**9), ("sharded", 6000)):
        kind = CLASS[CASES[case][0]]
        path = huggingface.save_hf(tmp_path / name, config, params, architecture=kind, max_shard_bytes=shard_bytes)
        assert (path / "model.safetensors.index.json").exists() == (name == "sharded")
        assert (path / "model.safetensors").exists() == (name == "whole")
        again, said = getattr(hf, kind).from_pretrained(path, output_loading_info=True)
        assert not any(said.values()), said
        with torch.no_grad():
            # The same weights; the sums may go another way, by where in memory a weight lies.
            assert_same(dict(again.named_parameters()), dict(model.named_parameters()))
            assert relative(again.eval()(input_ids=ids).logits, model(input_ids=ids).logits) < 1e-6
        assert again.config.tie_word_embeddings == config.tied
        config_again, params_again = huggingface.load_hf(path)
        assert config_again == config
        assert_same(params_again, params)


@every_case
def test_what_we_export_holds_their_tensors_under_their_names(case, saved, tmp_path):
    _, folder = saved(case)
    path = huggingface.save_hf(tmp_path / "out", *huggingface.load_hf(folder), architecture=CLASS[CASES[case][0]])
    assert_same(
        dict(sorted(load_file(path / "model.safetensors").items())),
        dict(sorted(load_file(folder / "model.safetensors").items())),
    )


@pytest.mark.parametrize("case", ["gpt2", "llama", "mixtral"])
def test_sharded_folders_read_as_whole_ones(case, saved, tmp_path):
    model, folder = saved(case)
    shards = save(model, tmp_path / "shards", max_shard_size="12KB")
    assert len(list(shards.glob("model-*.safetensors"))) > 2
    assert_same(huggingface.load_hf(shards)[1], huggingface.load_hf(folder)[1])


def test_shards_stay_below_the_limit(saved, tmp_path):
    path = huggingface.save_hf(tmp_path / "out", *huggingface.load_hf(saved("llama")[1]), max_shard_bytes=20_000)
    sizes = [sum(t.nbytes for t in load_file(file).values()) for file in path.glob("*.safetensors")]
    assert len(sizes) > 2 and max(sizes) <= 20_000
    assert json.loads((path / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == sum(sizes)


def test_mixtral_with_fused_experts(saved, tmp_path):
    model, folder = saved("mixtral")
    fused = save(model, tmp_path / "fused", save_original_format=False)
    assert any("gate_up_proj" in name for name in load_file(fused / "model.safetensors"))
    assert_same(huggingface.load_hf(fused)[1], huggingface.load_hf(folder)[1])


def test_gpt2_as_first_published_has_no_prefix_but_mask_buffers(saved, tmp_path):
    _, folder = saved("gpt2")
    old = copy_of(folder, tmp_path / "old")
    weights = {name.removeprefix("transformer."): t for name, t in load_file(folder / "model.safetensors").items()}
    for layer in range(2):
        weights[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    save_file(weights, old / "model.safetensors")
    assert_same(huggingface.load_hf(old)[1], huggingface.load_hf(folder)[1])


def test_a_tied_head_may_be_stored_too(saved, tmp_path):
    _, folder = saved("llama-tied-scaled")
    both = copy_of(folder, tmp_path / "both")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, both / "model.safetensors")
    config, params = huggingface.load_hf(both)
    assert config.tied and "w" not in params["head"]
    assert_same(params, huggingface.load_hf(folder)[1])


@pytest.mark.parametrize("rope", ["scaled", "default"])
def test_rope_in_the_spelling_of_transformers_4(rope, saved, tmp_path):
    _, folder = saved("llama-tied-scaled")
    scaling = {**LLAMA3} if rope == "scaled" else None
    old = copy_of(folder, tmp_path / "old", rope_parameters=None, rope_theta=1000.0, rope_scaling=scaling)
    config = huggingface.load_hf(old)[0]
    expected = (
        huggingface.load_hf(folder)[0]
        if scaling
        else dataclasses.replace(huggingface.load_hf(folder)[0], rope_scaling=None)
    )
    assert config == expected and config.rope_theta == 1000.0
    # And our export is read by either spelling.
    written = json.loads((huggingface.save_hf(tmp_path / "out", *huggingface.load_hf(old)) / "config.json").read_text())
    for gone in ({"rope_parameters"}, {"rope_theta", "rope_scaling"}):
        kept = {name: value for name, value in written.items() if name not in gone}
        known = hf.LlamaConfig(**kept).rope_parameters
        assert known["rope_theta"] == 1000.0 and known["rope_type"] == ("llama3" if scaling else "default")
        assert known.get("factor") == (4.0 if scaling else None)


def test_configs_say_what_the_model_is(saved):
    assert huggingface.load_hf(saved("gpt2-untied-wide")[1])[0] == GPT2Config(
        vocab_size=V, max_len=64, d_model=32, n_layers=2, n_heads=4, d_ff=72, dropout=0.1, tied=False, init_std=0.2
    )
    config = huggingface.load_hf(saved("mixtral-window")[1])[0]
    assert (config.pattern, config.top_k, config.n_experts, config.balance_coef, config.z_coef) == (
        "window:7",
        1,
        4,
        0.5,
        0.0,
    )
    assert (
        huggingface.load_hf(saved("llama")[1])[0].head_dim == 0
        and huggingface.load_hf(saved("llama-head-dim")[1])[0].head_dim == 12
    )


# The parameters of variations of a Llama, as published: the files' own counts. Gemma 2's report (table 2) counts those
# beside the embedding, and Gemma 3's files have an image encoder of so many beside the matrix that widens its output.
ENCODER = 416_867_184
VARIATIONS = {
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "phi3-mini": 3_821_079_552,
    "smollm3-3b": 3_075_098_624,
    "gemma2-2b": 2_024_517_888 + 256_000 * 2304,
    "gemma2-9b": 8_324_201_984 + 256_000 * 3584,
    "gemma2-27b": 26_047_480_320 + 256_000 * 4608,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 4_300_079_472 - ENCODER - 1152 * 2560,
    "gemma3-12b": 12_187_325_040 - ENCODER - 1152 * 3840,
    "gemma3-27b": 27_432_406_640 - ENCODER - 1152 * 5376,
}


ONE_EACH = ("qwen2.5-7b", "qwen3-8b", "mistral-7b", "olmo2-7b", "phi3-mini", "smollm3-3b", "gemma2-2b", "gemma3-4b")


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIATIONS)
def test_presets_have_the_published_number_of_parameters(name):
    assert num_params(build(preset(name))) == VARIATIONS[name]


@pytest.mark.parametrize(
    "name",
    [
        "gpt2-124m",
        "gpt2-1.5b",
        "llama-1b",
        "llama-8b",
        "llama2-70b",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ONE_EACH),
        "mixtral-8x7b",
        "deepseek-v3",
    ],
)
def test_presets_have_the_tensors_of_their_model(name, tmp_path):
    """Names and shapes of the real sizes, without the memory."""
    from fzero.checkpoint.convert.huggingface_config import write_config
    from fzero.checkpoint.convert.huggingface_families import full_name
    from fzero.checkpoint.convert.huggingface_names import row_tensors, tensor_shape

    content, family = write_config(preset(name))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.from_pretrained(tmp_path))
    leaves = huggingface.meta_leaves(preset(name))
    # As transformers holds them: the last layout.
    got = {
        full_name(family, there): tensor_shape(row, leaves)
        for row in family.layouts[-1]
        if row.leaf in leaves
        for there, _ in row_tensors(row, leaves)
    }
    theirs = {**dict(model.named_parameters()), **{name: b for name, b in model.named_buffers() if ROUTER in name}}
    assert got == {name: list(p.shape) for name, p in theirs.items()}


def test_scores_that_are_divided_by_the_root_of_a_heads_size_say_that_size():
    from fzero.checkpoint.convert.huggingface_config import write_config

    for name in ("gemma2-2b", "gemma3-1b"):
        content, _ = write_config(dataclasses.replace(preset(name), score_dim=0))
        assert content["query_pre_attn_scalar"] == preset(name).key_dim


def test_dtypes_are_kept_or_converted_on_the_way(saved, tmp_path):
    model, folder = saved("llama")
    half = save(copy.deepcopy(model).to(torch.bfloat16), tmp_path / "half")
    params = huggingface.load_hf(half)[1]
    assert {leaf.dtype for leaf in pytree.leaves(params)} == {torch.bfloat16}
    assert_same(huggingface.load_hf(folder, dtype=torch.bfloat16)[1], params)
    path = huggingface.save_hf(tmp_path / "out", *huggingface.load_hf(half))
    assert hf.LlamaForCausalLM.from_pretrained(path).dtype == torch.bfloat16
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"].half()
    mixed = copy_of(folder, tmp_path / "mixed")
    save_file(weights, mixed / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is torch\.float16 and other layers torch\.float32"
    ):
        huggingface.load_hf(mixed)
    assert huggingface.load_hf(mixed, dtype=torch.float32)[1]["blocks"]["mlp"]["w_up"].dtype == torch.float32


def test_parameters_own_their_memory(saved, tmp_path):
    _, folder = saved("llama")
    own = copy_of(folder, tmp_path / "own")
    params = huggingface.load_hf(own)[1]
    before = pytree.map(torch.clone, params)
    with open(own / "model.safetensors", "r+b") as f:
        f.seek(4096)
        f.write(b"\xff" * 4096)
    assert_same(params, before)


def test_the_tokenizer_travels_along(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<|endoftext|>": 0, "hello": 1, "world": 2, "[UNK]": 3}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    config = dataclasses.replace(preset("llama-tiny"), vocab_size=4, d_model=16, n_layers=1, d_ff=8)
    params = build(config).init(lambda name, shape, std, mean=0.0: torch.zeros(shape))
    path = huggingface.save_hf(tmp_path / "out", config, params, tokenizer=tmp_path, eos=0)
    assert hf.AutoTokenizer.from_pretrained(path)("hello world")["input_ids"] == [1, 2]
    assert hf.AutoConfig.from_pretrained(path).eos_token_id == 0
    with pytest.raises(ValueError, match=r"nothing\.json: no such file"):
        huggingface.save_hf(tmp_path / "other", config, params, tokenizer=tmp_path / "nothing.json")
    assert not (tmp_path / "other").exists()


BAD_CONFIGS = {
    "architecture": ("gpt2", {"architectures": ["BertModel"]}, "architectures is ['BertModel']"),
    "no architecture": ("gpt2", {"architectures": None}, "fzero reads GPT2LMHeadModel"),
    "activation": ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu'"),
    "two rates": ("gpt2", {"embd_pdrop": 0.3}, "embd_pdrop is 0.3 and resid_pdrop is 0.1"),
    "layer scaling": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    "bias": ("llama", {"attention_bias": True}, "attention_bias is True"),
    "mlp bias": ("llama", {"mlp_bias": True}, "mlp_bias is True"),
    "quantized": ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
    "output bias": ("qwen3", {"attention_bias": True}, "attention_bias is True"),
    "window": ("mistral", {"sliding_window": 0}, "sliding_window is 0; it must be at least 1, or null"),
    "layer type": (
        "gemma2",
        {"layer_types": ["full_attention", "chunked_attention"]},
        "layer_types has 'chunked_attention'; fzero supports sliding_attention and full_attention",
    ),
    "full layers and a window": (
        "mistral",
        {"sliding_window": 5, "layer_types": ["full_attention"] * 2},
        "fzero has sliding_attention in all layers here, by sliding_window; take one of the two out",
    ),
    "windows without one": (
        "mistral",
        {"sliding_window": None, "layer_types": ["sliding_attention"] * 2},
        "layer_types is",
    ),
    "a window that is off": (
        "smollm3",
        {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types has sliding_attention and use_sliding_window is False",
    ),
    "layer types": ("gemma2", {"layer_types": ["full_attention"]}, "layer_types has 1 values and the model 2 layers"),
    "both ways": ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    "cap of nothing": ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0"),
    "cap of Gemma 3": ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    "period": (
        "gemma3",
        {"layer_types": None, "sliding_window_pattern": 0},
        "sliding_window_pattern is 0; it must be at least 1",
    ),
    "long rope": (
        "phi3",
        {"rope_parameters": None, "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        "rope_type is 'longrope'",
    ),
    "rope type": (
        "llama",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        "rope_type is 'longrope'",
    ),
    "old rope type": (
        "llama",
        {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_type is 'dynamic'",
    ),
    "rope per layer": (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        "rope_parameters differ between layers",
    ),
    "rope incomplete": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}},
        "the llama3 rope scaling: low_freq_factor",
    ),
    "yarn incomplete": (
        "llama-yarn",
        {"rope_scaling": None, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
        "the yarn rope scaling: original_max_position_embeddings",
    ),
    "yarn upside down": (
        "gpt-oss",
        {"rope_parameters": {**GPT_OSS["rope_parameters"], "beta_fast": 0.5}},
        "the yarn rope scaling: beta_fast is 0.5; it must be above beta_slow=1",
    ),
    "factor of attention": (
        "gpt-oss",
        {"rope_parameters": {**GPT_OSS["rope_parameters"], "attention_factor": 2.0}},
        "attention_factor is 2.0; fzero has an attention_factor of 0.1 ln factor + 1 only",
    ),
    "factors of whole scores": (
        "deepseek",
        {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 0.7, "mscale_all_dim": 0.7}},
        "rope_scaling has {'attention_factor': None, 'mscale': 0.7, 'mscale_all_dim': 0.7}; fzero reads",
    ),
    "limit of the gate": ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
    "partial rope": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "text for a size": ("llama", {"hidden_size": "32"}, "hidden_size is '32'; it must be a whole number"),
    "null for a size": ("llama", {"num_hidden_layers": None}, "num_hidden_layers is None"),
    "another size": (
        "llama",
        {"intermediate_size": 41},
        "tensor model.layers.0.mlp.gate_proj.weight has shape [40, 32], config.json asks for [41, 32]",
    ),
    "more layers": (
        "llama",
        {"num_hidden_layers": 3},
        "tensors are missing for a LlamaForCausalLM of these sizes: model.layers.2.input_layernorm",
    ),
    "fewer layers": (
        "llama",
        {"num_hidden_layers": 1},
        "tensors are unexpected for a LlamaForCausalLM of these sizes: model.layers.1.input_layernorm",
    ),
    "falsely tied": ("llama", {"tie_word_embeddings": True}, "lm_head.weight is not model.embed_tokens.weight"),
    "falsely untied": (
        "gpt2",
        {"tie_word_embeddings": False},
        "tensors are missing for a GPT2LMHeadModel of these sizes: lm_head.weight",
    ),
    "jitter": ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
    "experts": ("mixtral", {"num_local_experts": 3}, "tensors are unexpected"),
}


@pytest.mark.parametrize("what", BAD_CONFIGS)
def test_a_config_that_fzero_cannot_follow_is_refused_by_name(what, saved, tmp_path):
    case, entries, said = BAD_CONFIGS[what]
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        huggingface.load_hf(copy_of(saved(case)[1], tmp_path / "bad", **entries))
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_folders_that_are_not_whole_models(saved, tmp_path):
    model, folder = saved("llama")

    def refused(path, said):
        with pytest.raises(ValueError, match=re.escape(said)) as error:
            huggingface.load_hf(path)
        assert "\n" not in str(error.value)

    refused(tmp_path / "nowhere", "config.json: no such file")
    no_weights = copy_of(folder, tmp_path / "none")
    (no_weights / "model.safetensors").unlink()
    refused(no_weights, "neither model.safetensors nor model.safetensors.index.json")
    cut = copy_of(folder, tmp_path / "cut")
    with open(cut / "model.safetensors", "r+b") as f:
        f.truncate(9000)
    refused(cut, "model.safetensors: damaged")
    shards = save(model, tmp_path / "shards", max_shard_size="12KB")
    sorted(shards.glob("model-00002-*"))[0].unlink()
    refused(shards, "no such file, but model.safetensors.index.json names it")
    index = save(model, tmp_path / "index", max_shard_size="12KB")
    (index / "model.safetensors.index.json").write_text("{}")
    refused(index, "model.safetensors.index.json: damaged: it has no weight_map")
    twice = save(model, tmp_path / "twice", max_shard_size="12KB")
    one, two, *_ = sorted(twice.glob("model-*.safetensors"))
    shutil.copy(one, two)
    refused(twice, " is there twice")
    text = copy_of(folder, tmp_path / "text")
    (text / "config.json").write_text("{")
    refused(text, "config.json: not JSON")
    whole = copy_of(folder, tmp_path / "int")
    weights = load_file(whole / "model.safetensors")
    save_file({**weights, "model.norm.weight": torch.ones(32, dtype=torch.int8)}, whole / "model.safetensors")
    refused(whole, "tensor model.norm.weight is torch.int8")
    save_file({**weights, "model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, whole / "model.safetensors")
    refused(whole, "tensors are unexpected for a LlamaForCausalLM of these sizes: model.layers.0.self_attn.q_proj.bias")


def test_safetensors_files_of_every_dtype_are_read_as_they_are_written(tmp_path):
    drawn = {
        str(dtype): torch.randint(0, 2, (3, 5), generator=torch.Generator().manual_seed(3)).to(dtype)
        for dtype in DTYPES
    }
    tensors = {
        **drawn,
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        "turned": torch.rand(4, 6).T.contiguous(),
    }
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    found = read_safetensors(tmp_path / "theirs")
    assert {name: (entry.dtype, entry.shape) for name, entry in found.items()} == {
        n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()
    }
    given = {name: entry.give() for name, entry in found.items()}
    assert all(torch.equal(given[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in drawn)
    assert all(torch.equal(given[name], tensors[name]) for name in tensors.keys() - drawn.keys())
    size = write_safetensors(tmp_path / "ours", dict(reversed(found.items())))
    begins = {name: table["data_offsets"][0] for name, table in header(tmp_path / "ours").items()}
    assert all(
        begin % tensors[name].dtype.itemsize == 0 for name, begin in begins.items()
    )  # for readers that map the file
    assert size == (tmp_path / "ours").stat().st_size
    assert all(
        torch.equal(t.view(torch.uint8), tensors[n].view(torch.uint8))
        for n, t in load_file(tmp_path / "ours").items()
        if t.dim()
    )


def header(file):
    content = file.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def header_of(file, change):
    """Change the header of a safetensors file."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    text = json.dumps(change(header(file))).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


def entry_of(table, **entries):
    return {**table, "b": {**table["b"], **entries}}


DAMAGED = {
    "nothing": (lambda file: file.write_bytes(b""), "damaged: a header of 0 bytes in a file of 0"),
    "length": (
        lambda file: file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:]),
        "damaged: a header of 18446744073709551615 bytes",
    ),
    "text": (
        lambda file: file.write_bytes(file.read_bytes().replace(b'"dtype"', b'"dt\xffpe"', 1)),
        "its header is not that",
    ),
    "list": (lambda file: header_of(file, lambda table: [1]), "its header is not that of a safetensors file"),
    "no shape": (
        lambda file: header_of(file, lambda table: {**table, "b": {"dtype": "F32"}}),
        "of its header: shape is missing",
    ),
    "more": (lambda file: file.write_bytes(file.read_bytes() + b"x"), "its header speaks of"),
    "less": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "its header speaks of"),
    "gap": (
        lambda file: header_of(file, lambda table: entry_of(table, data_offsets=[24, 32])),
        "b begins at byte 24 of the data",
    ),
    "shared": (
        lambda file: header_of(file, lambda table: entry_of(table, data_offsets=[8, 16])),
        "b begins at byte 8 of the data",
    ),
    "size": (lambda file: header_of(file, lambda table: entry_of(table, shape=[3])), "tensor b [3] of F32 has 8 bytes"),
    "dtype": (
        lambda file: header_of(file, lambda table: entry_of(table, dtype="C64")),
        "tensor b is of dtype C64; these are known",
    ),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_safetensors_file(how, tmp_path):
    file = tmp_path / "some.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(2)}, file)
    assert list(read_safetensors(file)) == ["a", "b"]
    change, said = DAMAGED[how]
    change(file)
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        read_safetensors(file)
    assert str(error.value).startswith(f"{file}: ") and "\n" not in str(error.value)


def test_a_file_that_is_cut_while_it_is_read(tmp_path):
    file = tmp_path / "some.safetensors"
    save_file({"a": torch.ones(4)}, file)
    entry = read_safetensors(file)["a"]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged: it ends within tensor a"):
        entry.give()


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(saved, tmp_path):
    config, params = huggingface.load_hf(saved("mixtral")[1])

    def refused(config, params, said, folder=tmp_path / "out"):
        with pytest.raises(ValueError, match=re.escape(said)) as error:
            huggingface.save_hf(folder, config, params)
        assert "\n" not in str(error.value)

    refused(
        dataclasses.replace(config, pattern="local:4"),
        params,
        "pattern is 'local:4', which MixtralForCausalLM does not compute",
    )
    refused(dataclasses.replace(config, capacity_factor=1.5), params, "capacity_factor is 1.5")
    refused(
        dataclasses.replace(config, d_ff=41),
        params,
        "blocks/moe/w_gate has shape [2, 4, 32, 40]; the config says [2, 4, 32, 41]",
    )
    refused(dataclasses.replace(config, tied=True), params, "extra head/w")
    refused(MLPConfig(), {}, "a model of MLPConfig has no architecture in transformers")
    llama, weights = huggingface.load_hf(saved("llama")[1])
    refused(
        dataclasses.replace(llama, pattern="window:4,window:5"),
        weights,
        "pattern is 'window:4,window:5', which LlamaForCausalLM does not compute",
    )
    refused(
        dataclasses.replace(llama, activation="gelu"),
        weights,
        "a LlamaConfig with activation=gelu has no architecture in transformers",
    )
    with pytest.raises(ValueError, match=r"architecture is 'Mistral'.*; a LlamaConfig has LlamaForCausalLM, Mistral"):
        huggingface.save_hf(tmp_path / "out", llama, weights, architecture="Mistral")
    refused(llama, {**weights, "head": {**weights["head"], "w": weights["head"]["w"].long()}}, "head/w is torch.int64")
    assert list(tmp_path.iterdir()) == []
    refused(llama, weights, "already exists", folder=tmp_path)

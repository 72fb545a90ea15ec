"""DoRA by its formula and on meshes; adapters to and from PEFT, and runs that begin with one."""

import json
import re

import chats
import pytest
import ranks
import torch
from close import assert_close
from huggingface_models import Widened
from law_cases import F64, FP64, batch_of, config_of

import fzero
from fzero import models, optim
from fzero.checkpoint import huggingface, peft
from fzero.core import prng, pytree
from fzero.models import Ctx
from fzero.models.weights import LowRankSum
from fzero.run import build, first_state, run_folder, tuned_config, weights
from fzero.sharding import gather_on_first

TARGETS = {"gpt2": r"/(attn|mlp)/w_", "llama": r"/(attn|mlp)/w_", "deepseek": r"/(attn|mlp|shared)/w_"}
CTX = Ctx(dtype=F64)


def dora_of(kind, **changes):
    """(the base, the same with DoRA)."""
    base = models.build(config_of(kind, dropout=0.0, **changes))
    return base, models.lora(base, 2, 6.0, TARGETS[kind], dora=True)


def params_of(model, moved=True):
    """Parameters, with factors b and magnitudes that training has moved."""
    params = models.set_magnitudes(model, models.init_params(model, prng.key(1), F64))

    def draw(name, leaf):
        noise = 0.3 * prng.normal(prng.fold_in(prng.key(9), name), leaf.shape, dtype=F64)
        return noise if name.endswith("_lora_b") else leaf * (1.0 + noise) if name.endswith("_lora_m") else leaf

    return pytree.map_named(draw, params) if moved else params


def without_factors(base, params):
    """The parameters of the base."""
    named = pytree.named_leaves(params)
    return base.init(lambda name, *shape, **options: named[name])


def loss(model, params):
    return models.loss(model, params, batch_of(0), CTX).total


# ---- DoRA ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", *(pytest.param(k, marks=pytest.mark.slow) for k in ("gpt2", "deepseek"))])
def test_dora_is_its_formula(kind):
    """W_j = m_j v_j / |v_j| with v = w + s a b, in which the gradient takes |v_j| for a constant (section 4.3)."""
    base, model = dora_of(kind)
    begin = params_of(model, moved=False)
    plain = without_factors(base, begin)
    assert_close(loss(model, begin), loss(base, plain), rtol=1e-13)
    params = params_of(model)

    def written_out(p):
        named, whole = pytree.named_leaves(p), {}
        for name, w in named.items():
            if f"{name}_lora_a" in named:
                v = w + 3.0 * named[f"{name}_lora_a"] @ named[f"{name}_lora_b"]
                w = named[f"{name}_lora_m"][:, None] * v / v.detach().square().sum(1, keepdim=True).sqrt()
            if re.search(models.LORA, name) is None:
                whole[name] = w
        return loss(base, without_factors(base, pytree.nest(whole)))

    assert_close(loss(model, params), written_out(params), rtol=1e-12)
    got, expected = (torch.func.grad(f)(params) for f in (lambda p: loss(model, p), written_out))
    trained = lambda tree: {n: g for n, g in pytree.named_leaves(tree).items() if re.search(models.LORA, n)}  # noqa: E731
    assert_close(trained(got), trained(expected), rtol=1e-8, atol=1e-12)
    assert_close(loss(base, models.merge(model, params)), loss(model, params), rtol=1e-12)


def test_the_dense_weight_has_the_values_and_the_gradients_of_the_product():
    g = torch.Generator().manual_seed(0)
    x, w, a, b = (torch.randn(s, generator=g, dtype=F64) for s in ((5, 4), (4, 6), (4, 2), (2, 6)))
    m = torch.rand(6, generator=g, dtype=F64) + 0.5
    product = lambda a, b, m: LowRankSum(w, a, b, 0.7, m).product(x).sin().sum()  # noqa: E731
    dense = lambda a, b, m: (x @ LowRankSum(w, a, b, 0.7, m).dense()).sin().sum()  # noqa: E731
    assert_close(dense(a, b, m), product(a, b, m), rtol=1e-12)
    got, expected = (torch.func.grad(f, (0, 1, 2))(a, b, m) for f in (dense, product))
    assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_magnitudes_of_weights_in_codes_are_those_of_what_the_codes_say():
    coded = models.quantized(models.build(models.MLPConfig()), "nf4", 16, targets="/w_")
    model = models.lora(coded, 2, targets="/w_", dora=True)
    params = models.set_magnitudes(model, models.init_params(model, prng.key(0), F64))
    plain = models.lora(coded, 2, targets="/w_")
    batch = {"tokens": torch.arange(12).reshape(2, 6)}
    less = models.init_params(plain, prng.key(0), F64)
    expected = models.logits(plain, less, batch, CTX)
    # Codes stand for float32, in which their columns' norms are too.
    assert_close(models.logits(model, params, batch, CTX), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="set_magnitudes: the model has no magnitudes"):
        models.set_magnitudes(plain, less)


OPTIMIZERS = {"sgd": optim.sgd(0.3), "adam": optim.adamw(1e-2)}


def steps(mesh, kind, optimizer, stage, few_heads):
    """(parameters, losses) of three steps."""
    _, model = dora_of(kind, vocab_size=18, **({} if few_heads else {"n_heads": 2}))
    plan = fzero.zero_plan(stage, model, mesh, policy=FP64, frozen=models.frozen_leaves(model.config))
    tx = OPTIMIZERS[optimizer]
    state = fzero.init_state(params_of(model), tx, plan, seed=0)
    step = fzero.make_train_step(model, tx, plan, micro_batches=2)
    losses = []
    for i in range(3):
        state, metrics = step(state, fzero.local_batch(batch_of(i), mesh, micro_batches=2))
        losses.append(metrics.loss)
    return gather_on_first(state.params, plan.params, mesh), losses


MESHES = [
    ("llama", "sgd", {"tp": 2}, 0),
    pytest.param("llama", "adam", {"dp": 2}, 3, marks=pytest.mark.slow),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("gpt2", "adam", {"tp": 2}, 0), ("llama", "adam", {"dp": 2, "tp": 2}, 3))),
]  # fmt: skip


@pytest.mark.parametrize("kind, optimizer, sizes, stage", MESHES)
def test_a_mesh_trains_dora_as_one_process(kind, optimizer, sizes, stage):
    expected, losses = steps(fzero.one_process(), kind, optimizer, 0, True)
    count = sizes.get("dp", 1) * sizes.get("tp", 1)
    got = ranks.run(count, steps, kind, optimizer, stage, True, mesh=sizes)
    assert_close(got[0][1], losses, rtol=1e-10)
    assert_close(got[0][0], expected, rtol=1e-10, atol=1e-11)


# ---- PEFT ------------------------------------------------------------------------------------------------------------


# RoPE's angles are in float32, there and here, and differ in their last bits.
@pytest.mark.parametrize("kind, dora, exact", [
    ("gpt2", True, 1e-10),
    pytest.param("llama", False, 1e-5, marks=pytest.mark.slow),
    pytest.param("llama", True, 1e-5, marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT asks for it
def test_peft_computes_the_same_and_gives_the_same_back(kind, dora, exact, tmp_path):
    transformers, library = pytest.importorskip("transformers"), pytest.importorskip("peft")
    targets = "/attn/w_o|/mlp/w_" if kind == "gpt2" else TARGETS[kind]
    inner = config_of(kind, dropout=0.0)
    base = models.build(inner)
    model = models.lora(base, 2, 6.0, targets, dora=dora)
    params = params_of(model) if dora else pytree.map_named(
        lambda n, p: p + 0.1 if n.endswith("_lora_b") else p, models.init_params(model, prng.key(1), F64))  # fmt: skip
    named = pytree.named_leaves(params)
    start = {n: leaf for n, leaf in named.items() if re.search(models.LORA, n) is None}
    huggingface.save_hf(tmp_path / "base", inner, without_factors(base, params))
    peft.save_adapter(tmp_path / "adapter", model.config, params, base=str(tmp_path / "base"))
    ids = torch.arange(12).reshape(2, 6)
    with Widened():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=F64)
        theirs = library.PeftModel.from_pretrained(theirs, tmp_path / "adapter", is_trainable=True).eval()
        logits = theirs(ids).logits
    ours = lambda p: models.logits(model, p, {"tokens": ids}, CTX)  # noqa: E731
    assert_close(ours(params), logits, rtol=exact, atol=exact)
    logits.square().sum().backward()
    grads = pytree.named_leaves(torch.func.grad(lambda p: ours(p).square().sum())(params))
    theirs.save_pretrained(tmp_path / "again")
    opened = peft.open_adapter(tmp_path / "again", tmp_path / "base", inner)
    assert opened.leaves.keys() == named.keys() - start.keys()
    assert all(torch.equal(entry.give(), named[name]) for name, entry in opened.leaves.items())
    assert (opened.config.rank, opened.config.alpha, opened.config.dora) == (2, 6.0, dora)
    assert models.lora(base, 2, 6.0, opened.config.targets, dora=dora).config == opened.config
    # Gradients, read as an adapter of PEFT's.
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.grad is not None:
                parameter.copy_(parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    for name, entry in peft.open_adapter(tmp_path / "gradients", tmp_path / "base", inner).leaves.items():
        assert_close(entry.give(), grads[name], rtol=10 * exact, atol=10 * exact)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_run_with_dora_begins_at_the_model_that_it_is_given(folder, quantize):
    table = {"data": {"path": "chat.jsonl", "seq_len": 96}, "precision": {"policy": "fp32"}}
    table |= {"train": {"compiled": False, "batch": 4, "micro_batch": 2}}
    config = tuned_config(folder / "qwen3", table, lora={"rank": 2, "dora": True}, quantize=quantize)
    given = weights.load_start(folder / "qwen3").params
    state, base = first_state(build.build(config), given), models.build(config.model.base)
    given = models.quantize_weights(base, given) if quantize else given
    ids = {"tokens": torch.arange(12)[None]}
    expected = models.logits(base, given, ids)
    assert_close(models.logits(models.build(config.model), state.params, ids), expected, rtol=1e-4, atol=1e-5)


FLAGS = chats.FLAGS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two Qwen3 of one size, conversations, and an adapter of the first."""
    place = chats.tuning_folder(tmp_path_factory.mktemp("adapters"))
    chats.qwen3_folder(place / "other", seed=1)
    inner = chats.QWEN3
    model = models.lora(models.build(inner), 2, targets="/attn/w_[qo]$")
    drawn = pytree.named_leaves(models.init_params(model, prng.key(2)))
    named = drawn | pytree.named_leaves(weights.load_start(place / "qwen3").params)
    params = without_factors(model, pytree.nest(named))
    peft.save_adapter(place / "adapter", model.config, params, base=str(place / "qwen3"))
    return place


def test_a_run_goes_on_with_an_adapter_and_gives_it_back(folder, tmp_path, fz):
    run, out = tmp_path / "run", tmp_path / "adapter"
    # In bf16 the factors have masters, and the frozen weights none.
    flags = ["bf16" if flag == "fp32" else flag for flag in FLAGS]
    start = ["finetune", "--data", folder / "chat.jsonl", *flags, "--steps", 2]
    assert fz(*start, "--init", folder / "qwen3", "--lora", "rank=4,on=attn,dora", "--out", run)[::2] == (0, "")
    code, said, err = fz("export", run, "--out", out, "--adapter")
    assert (code, err) == (0, "") and f"on {folder / 'qwen3'}" in said
    trained = pytree.named_leaves(weights.load(run, wide=True).params)
    assert {str(leaf.dtype) for leaf in trained.values()} == {"torch.float32", "torch.bfloat16"}
    begun = weights.load_start(out)
    assert all(
        torch.equal(leaf.to(trained[n].dtype), trained[n]) for n, leaf in pytree.named_leaves(begun.params).items()
    )
    assert begun.model.config.dora and trained["blocks/attn/w_q_lora_m"].dim() == 2
    assert json.loads((out / "adapter_config.json").read_text())["target_modules"] == [
        "k_proj", "o_proj", "q_proj", "v_proj"]  # fmt: skip
    assert fz(*start, "--init", out, "--out", tmp_path / "on")[::2] == (0, "")
    assert run_folder.read_config(tmp_path / "on").preset == "finetune-lora"
    assert fz("export", tmp_path / "on", "--out", tmp_path / "again", "--adapter")[::2] == (0, "")
    assert fz("export", run, "--out", tmp_path / "merged")[::2] == (0, "")
    assert fz(*start, "--init", run, "--out", tmp_path / "from-run")[::2] == (0, "")


def change(folder, out, **about):
    """A copy of the adapter with other entries in its adapter_config.json."""
    out.mkdir()
    for path in (folder / "adapter").iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((out / "adapter_config.json").read_text()) | about
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


def test_an_adapter_that_does_not_fit_is_one_line(folder, tmp_path, fz):
    small = chats.LlamaConfig(260, 96, 16, 2, 4, 2, 64, qk_norm=True, norm_eps=1e-6)
    chats.qwen3_folder(tmp_path / "small", config=small)
    long = chats.LlamaConfig(260, 96, 32, 3, 4, 2, 64, qk_norm=True, norm_eps=1e-6)
    chats.qwen3_folder(tmp_path / "long", config=long)
    for i, (about, message) in enumerate((
        ({"base_model_name_or_path": str(folder / "other")}, "for another base than .*other: the sizes agree"),
        ({"base_model_name_or_path": str(tmp_path / "small")}, "an adapter for another base .*lora_A is .2, 32., and"),
        ({"base_model_name_or_path": str(tmp_path / "long")}, "another base .*has factors for 2 of the 3 layers of"),
        ({"base_model_name_or_path": "Qwen/Qwen3"}, "base_model_name_or_path is 'Qwen/Qwen3', which is no folder here"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; fzero has LORA alone"),
        ({"bias": "all"}, "bias is 'all'; fzero has 'none' alone"),
        ({"lora_alpha": True}, "lora_alpha is True; it must be a finite number"),
        ({"r": 3}, "an adapter for another base .*lora_A is .2, 32., and there it would be .3, 32."),
        ({"r": "2"}, "r is '2'; it must be a whole number"),
    )):  # fmt: skip
        init = change(folder, tmp_path / f"adapter-{i}", **about)
        code, _, err = fz("finetune", "--init", init, "--data", folder / "chat.jsonl", *FLAGS, "--out", tmp_path / "x")
        assert code == 2 and err.count("\n") == 1 and re.search(message, err), err
    with pytest.raises(ValueError, match=r"w_q is a part of transformer\.h\.0\.attn\.c_attn in transformers"):
        _, model = dora_of("gpt2")
        peft.save_adapter(tmp_path / "no", model.config, params_of(model))


def test_an_entry_that_changes_an_adapter_is_refused_by_name(folder, tmp_path):
    def opened(name, **about):
        return peft.open_adapter(change(folder, tmp_path / name, **about), folder / "qwen3", chats.QWEN3)

    for i, (about, said) in enumerate((
        ({"init_lora_weights": "pissa_niter_4"}, "weights is 'pissa_niter_4'; .*another model at each load: let PEFT"),
        ({"init_lora_weights": "corda"}, "path_initial_model_for_weight_conversion"),
        ({"alora_invocation_tokens": [3]}, r"alora_invocation_tokens is \[3\]; fzero has None alone"),
        ({"use_dorra": True}, r"use_dorra is True \(did you mean use_dora\?\); fzero does not know what that changes"),
        ({"target_modules": ["q_proj"]}, "layers.0.self_attn.o_proj: target_modules does not name it, and factors"),
        ({"target_modules": ["q_proj", "o_proj", "lm_head"]}, "has 'lm_head', of which there are no factors"),
        ({"target_modules": ".*_proj"}, "layers.0.mlp.down_proj: target_modules names it, and no factors of it"),
        ({"exclude_modules": ["o_proj"]}, "o_proj: target_modules does not name it, and factors of it are there"),
    )):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            opened(f"bad-{i}", **about)
    found = opened("drops", lora_dropout=0.1, peft_version="9", init_lora_weights="gaussian", a_new_entry=None)
    assert found.config.rank == 2 and found.notes == [
        f"{tmp_path / 'drops'}: was trained with lora_dropout 0.1; fzero trains factors without dropout"
    ]

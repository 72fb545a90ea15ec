"""Models of transformers by their own code: losses, gradients and steps are theirs, and weights go in and out bit by
bit."""

import functools
import json
import os
import re
import warnings
from pathlib import Path

import pytest
import ranks
import torch
from close import assert_close, assert_same
from safetensors.torch import load_file

pytest.importorskip("transformers")
import huggingface_models as theirs
import transformers

import fzero
from fzero import optim
from fzero.models import loss_of_task
from fzero.models.transformers_module import class_of

slow = pytest.mark.slow
STEPS, RATE = 5, 0.5
OFTEN = {"Gemma3", "DeepSeek-V3", "BERT", "ViT", "T5"}  # one of each kind; the others are exhaustive


def task_of(name):
    return class_of(theirs.MODELS[name](), theirs.TASKS.get(name, ""))[1]


@functools.cache
def by_transformers(name):
    """(the first gradients, the parameters after steps of torch's SGD, the losses) by the module as transformers makes
    it, with experts of its own."""
    config, batch = theirs.MODELS[name](), [theirs.batch_of(name, i) for i in range(STEPS)]
    cls, task = class_of(config, theirs.TASKS.get(name, ""))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = cls._from_config(config, experts_implementation="batched_mm").double().eval()
    sgd, log, first = torch.optim.SGD(module.parameters(), lr=RATE), [], {}
    with theirs.Widened():
        for one in batch:
            total, number = loss_of_task(task, module, one)
            sgd.zero_grad()
            (total / number).backward()
            first = first or {
                key: torch.zeros_like(p) if p.grad is None else p.grad.clone() for key, p in named(module)
            }
            sgd.step()
            log.append(float(total.detach() / number))
    return first, {key: p.detach() for key, p in named(module)}, log


def named(module):
    return list(module.named_parameters())


def by_fzero(mesh, name, stage, folder, remat="none", tp=None):
    """(parameters after one step and after all of them, losses), by what the folder says that fzero writes."""
    task, tx, log, after = theirs.TASKS.get(name, ""), optim.sgd(RATE), [], []
    model = fzero.from_huggingface(theirs.MODELS[name](), task=task, batch=theirs.batch_of(name, 0), seed=3, tp=tp)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "[A-Za-z0-9]+: tp=2 splits")
        plan = fzero.zero_plan(stage, model, mesh, policy="fp64")
    state = fzero.init_state(model, tx, plan, seed=0)
    step = fzero.make_train_step(model, tx, plan, execution=fzero.Execution(remat=remat))
    for i in range(STEPS):
        with theirs.Widened():
            state, metrics = step(state, fzero.local_batch(theirs.batch_of(name, i), mesh))
        log.append(float(metrics.loss))
        if i in (0, STEPS - 1):
            after.append(fzero.to_huggingface(state, theirs.MODELS[name](), folder / str(i), plan, task=task))
    return after, log


def loaded(folder, name):
    """The weights of a folder, in its own dtype: their loader makes some float32 (routers, in transformers 5.24)."""
    cls, _ = class_of(theirs.MODELS[name](), theirs.TASKS.get(name, ""))
    module = {key: p.detach() for key, p in named(cls.from_pretrained(folder))}
    written = {key: x for file in folder.glob("*.safetensors") for key, x in load_file(file).items() if key in module}
    assert all(torch.equal(x.to(module[key].dtype), module[key]) for key, x in written.items())
    return {**module, **written}


def assert_theirs(name, result):
    (first, last), log = result
    gradients, expected, expected_log = by_transformers(name)
    assert_close(log, expected_log, rtol=1e-10)
    before = {key: p.detach().double() for key, p in named(begun(name))}
    moved = {key: (before[key] - leaf) / RATE for key, leaf in loaded(first, name).items()}
    assert_close(moved, gradients, rtol=1e-10, atol=1e-13)
    assert_close(loaded(last, name), expected, rtol=1e-10, atol=1e-12)


def begun(name):
    config = theirs.MODELS[name]()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return class_of(config, theirs.TASKS.get(name, ""))[0]._from_config(config)


def tiers():
    return [pytest.param(name, marks=slow if name in OFTEN else pytest.mark.exhaustive) for name in theirs.MODELS]


def test_five_steps_of_qwen3_are_theirs(tmp_path):
    assert_theirs("Qwen3", by_fzero(fzero.one_process(), "Qwen3", 0, tmp_path))


@pytest.mark.parametrize("name", tiers())
def test_five_steps_at_stage_3_on_two_ranks_are_theirs(name, tmp_path):
    for result in ranks.run(2, by_fzero, name, 3, tmp_path, "full"):
        assert_theirs(name, result)


@pytest.mark.parametrize("name", [pytest.param("Gemma3", marks=slow), pytest.param("Qwen3", marks=slow)])
def test_five_steps_split_by_their_own_plan_are_theirs(name, tmp_path):
    for result in ranks.run(2, by_fzero, name, 0, tmp_path, mesh={"tp": 2}):
        assert_theirs(name, result)


FOUND = {  # linear layers of a layer that tp=2 splits by what is found, and all of them; see docs/huggingface.md
    "GPTNeoX": (4, 4),
    "BERT": (6, 6),
    "OPT": (6, 6),
    "ViT": (6, 6),
    "GPT2": (2, 4),
    "Bloom": (2, 4),
    "Falcon": (2, 4),
    "T5": (4, 16),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=slow if name in ("GPTNeoX", "BERT") else pytest.mark.exhaustive) for name in FOUND],
)
def test_five_steps_split_by_what_is_found_are_theirs(name, tmp_path):
    model = fzero.from_huggingface(
        theirs.MODELS[name](), task=theirs.TASKS.get(name, ""), batch=theirs.batch_of(name, 0), tp="auto"
    )
    with pytest.warns(UserWarning, match="tp=2 splits"):
        plan = fzero.zero_plan(0, model, fzero.fake_mesh({"tp": 2}))
    linears = [leaf for leaf, one in plan.leaves.items() if leaf.endswith("/weight") and "tp" in one.params.axes]
    split, every = FOUND[name]
    assert len(linears) == split and every == sum(map(len, model.embed.__self__.ways.values()))
    page = (Path(__file__).parents[1] / "docs" / "huggingface.md").read_text()
    assert re.search(rf"^\| {split} of {every} \| [^|]*\b{name}\b", page, re.MULTILINE)
    for result in ranks.run(2, by_fzero, name, 0, tmp_path, "none", "auto", mesh={"tp": 2}):
        assert_theirs(name, result)


def tp_refusal(mesh, name, rules):
    """(the leaves that are split over tp, the refusal of a first step)"""
    tx = optim.sgd(RATE)
    model = fzero.from_huggingface(theirs.MODELS[name](), batch=theirs.batch_of(name, 0), tp=rules)
    plan = fzero.zero_plan(0, model, mesh)
    split = sorted(leaf for leaf, one in plan.leaves.items() if "tp" in one.params.axes)
    try:
        state = fzero.init_state(model, tx, plan, seed=0)
        fzero.make_train_step(model, tx, plan)(state, theirs.batch_of(name, 0))
    except ValueError as error:
        return split, str(error)
    return split, ""


def dropped(name, micro_batches, remat):
    """Losses and norms of two steps in train mode, and the loss of an evaluation."""
    task = theirs.TASKS.get(name, "")
    model = fzero.from_huggingface(
        theirs.DROPPING[name](), task=task, batch=theirs.batch_of(name, 0), seed=3, dropout=True
    )
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy="fp64")
    state, log = fzero.init_state(model, optim.sgd(RATE), plan, seed=0), []
    how = fzero.Execution(remat=remat)
    step = fzero.make_train_step(model, optim.sgd(RATE), plan, micro_batches=micro_batches, execution=how)
    evaluated = fzero.make_eval_step(model, plan)(state.params, theirs.batch_of(name, 0))
    for i in range(2):
        torch.rand(3)
        state, metrics = step(state, theirs.batch_of(name, i))
        log += [metrics.loss, metrics.grad_norm]
    return model, torch.stack(log), evaluated


OFTEN_DROPPED = ("OPT", "DistilBERT")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=slow if n in OFTEN_DROPPED else pytest.mark.exhaustive) for n in theirs.DROPPING],
)
def test_their_dropout_is_drawn_by_the_states_key(name):
    model, log, evaluated = dropped(name, 1, "none")
    assert model.config.n_layers >= 3  # layer by layer
    assert_close(dropped(name, 2, "full")[1], log, rtol=1e-12)
    config = theirs.DROPPING[name]()
    cls, task = class_of(config, theirs.TASKS.get(name, ""))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = cls._from_config(config).double().eval()
    total, number = loss_of_task(task, module, theirs.batch_of(name, 0))
    assert_close(evaluated.total / evaluated.num_tokens, (total / number).detach(), rtol=1e-5)
    assert abs(float(log[0] - evaluated.total / evaluated.num_tokens)) > 1e-4


def test_what_their_plan_gathers_is_left_whole_and_a_norm_over_split_features_is_refused():
    rules = {r"self_attn\.[qkv]_proj": "columns", r"self_attn\.o_proj": "rows"}
    for split, error in ranks.run(2, tp_refusal, "Olmo2", None, mesh={"tp": 2}):
        assert split == [f"blocks/mlp/{name}_proj/weight" for name in ("down", "gate", "up")] and not error
    for _, error in ranks.run(2, tp_refusal, "Olmo2", rules, mesh={"tp": 2}):
        assert error.startswith("tp=2: ") and "\n" not in error, error


@pytest.mark.parametrize("name", [pytest.param("Qwen3-MoE", marks=slow), "Llama"])
def test_a_folder_in_files_is_read_and_written_bit_by_bit(name, tmp_path, monkeypatch):
    module = begun(name).to(torch.bfloat16)
    module.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    model, tx = fzero.from_huggingface(tmp_path / "theirs"), optim.sgd(0.1)
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy="bf16")
    state = fzero.init_state(model, tx, plan, seed=0)
    write, files = type(module).save_pretrained, []

    def watched(self, folder, state_dict, **options):
        files.extend(leaf.untyped_storage().filename for name, leaf in state_dict.items() if name.endswith("weight"))
        write(self, folder, state_dict=state_dict, **options)

    monkeypatch.setattr(type(module), "save_pretrained", watched)
    fzero.to_huggingface(state, tmp_path / "theirs", tmp_path / "ours", plan)
    assert files and all(files) and not any(map(os.path.exists, files))  # on the disk, and without a name
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "ours"}
    again = class_of(module.config, "")[0].from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    assert_same(dict(again.state_dict()), dict(module.state_dict()))
    assert again.config.use_cache and not (tmp_path / "ours.partial").exists()
    with pytest.raises(ValueError, match=r"ours: already exists; name another folder"):
        fzero.to_huggingface(state, tmp_path / "theirs", tmp_path / "ours", plan)


def test_no_weight_of_a_folder_is_held(tmp_path):
    begun("Llama").save_pretrained(tmp_path / "theirs")
    model = fzero.from_huggingface(tmp_path / "theirs")
    copies = model.embed.__self__
    held = [*copies.skeleton.parameters(), *copies.templates["blocks"][0].parameters()]
    assert held and all(p.is_meta for p in held)
    file = tmp_path / "theirs" / "model.safetensors"
    file.rename(tmp_path / "away")
    plan = fzero.zero_plan(0, model, fzero.one_process())
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        fzero.init_state(model, optim.sgd(0.1), plan, seed=0)


def test_frequencies_of_rotary_embeddings_stay_float32():
    model = fzero.from_huggingface(theirs.MODELS["Llama"]())
    buffers = model.embed.__self__.buffers.to_device(torch.device("cpu"), torch.bfloat16)
    assert {name: leaf.dtype for name, leaf in buffers.items()} == {
        "model.rotary_emb.inv_freq": torch.float32,
        "model.rotary_emb.original_inv_freq": torch.float32,
    }


def test_mistakes_are_one_line(tmp_path):
    def refused(message, *args, error=ValueError, **options):
        with pytest.raises(error, match=message) as caught:
            fzero.from_huggingface(*args, **options)
        assert "\n" not in str(caught.value)

    refused(r"no such folder with a config\.json; nothing is downloaded", "Qwen/Qwen3-0.6B")
    refused(r"the source is a Linear; give a folder", torch.nn.Linear(1, 1), error=TypeError)
    refused(r"task='causl': it must be one of .*did you mean causal", theirs.MODELS["Llama"](), task="causl")
    refused(r"bert: give task=, one of causal, masked, classes", theirs.MODELS["BERT"]())
    refused(r"llama in transformers has no class for task='masked'", theirs.MODELS["Llama"](), task="masked")
    module = begun("Llama")
    module.save_pretrained(tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    for change, message in (
        ({"intermediate_size": 40}, r"_proj\.weight has shape .*by the config"),
        ({"num_hidden_layers": 4}, r"model\.layers\.3\.\w+.* is missing from the weights"),
        ({"num_hidden_layers": 2}, r"model\.layers\.2\.\w+.* and LlamaForCausalLM has no such leaf"),
    ):
        (tmp_path / "theirs" / "config.json").write_text(json.dumps({**config, **change}))
        refused(message, tmp_path / "theirs")


@slow
@pytest.mark.parametrize("name", ["GPTNeoX", "T5"])
def test_a_module_that_would_keep_keys_and_values_is_split(name):
    config = theirs.MODELS[name]()
    module = class_of(config, theirs.TASKS.get(name, ""))[0]._from_config(config)
    assert module.config.use_cache  # which their classes do
    batch = theirs.batch_of(name, 0)
    loss = lambda call, batch: (call(**batch).loss, 1)  # noqa: E731
    assert fzero.from_module(module, loss, batch=batch).config.n_layers >= config.num_hidden_layers
    assert module.config.use_cache


REASONS = {
    "Jamba": (
        lambda: transformers.JambaConfig(
            **theirs.SIZES, num_experts=4, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False, pad_token_id=0
        ),
        r"layer 1 is not like layer 0: feed_forward is a JambaSparseMoeBlock and not a JambaMLP",
    ),
    "RWKV": (
        lambda: transformers.RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=7, context_length=16),
        r"modeling_rwkv\.py:\d+ .*div_",
    ),
}


@slow
@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_be_cut_is_in_the_table_of_the_docs(name):
    make, reason = REASONS[name]
    page = (Path(__file__).parents[1] / "docs" / "huggingface.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("|") and name in line.split("|")[1]]
    batch = {key: leaf for key, leaf in theirs.batch_of(name, 0).items() if key != "attention_mask"}
    if "refused" in row:
        with pytest.raises(ValueError, match=reason):
            fzero.from_huggingface(make(), batch=batch)
        return
    with pytest.warns(UserWarning, match=rf"it is trained whole, and not layer by layer: .*{reason}"):
        fzero.from_huggingface(make(), batch=batch)

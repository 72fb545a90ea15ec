"""Weights of other systems (fzero/migrate): what `transformers`, torch.distributed.checkpoint and DeepSpeed wrote gives
the same logits.

The folders of DeepSpeed are made here, in the layout that `universal` below spells out. It was found by running
DeepSpeed 0.19.8 (ZeRO stages 1, 2 and 3 on two ranks, GPT-2, Llama tied and untied, Mixtral) and ds_to_universal;
`test_the_real_deepspeed` does so again where DeepSpeed is installed, and compares file by file what it wrote with what
is made here."""

import collections
import enum
import importlib.util
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from close import assert_same
from hf_cases import relative, save, theirs, tokens
from ranks import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from fzero import checkpoint, models
from fzero.checkpoint import convert, huggingface
from fzero.cli import main
from fzero.core import pytree
from fzero.models import Ctx, logits
from fzero.run import weights

FAMILIES = ("llama", "llama-tied-scaled", "gpt2", "mixtral")
TIED = {
    "llama-tied-scaled": ("lm_head.weight", "model.embed_tokens.weight"),
    "gpt2": ("lm_head.weight", "transformer.wte.weight"),
}


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """case -> (their model, the config.json of its folder, our parameters of it), each made once."""
    made = {}

    def get(case):
        if case not in made:
            model = theirs(case)
            folder = save(model, tmp_path_factory.mktemp(case) / "model")
            made[case] = model, folder / "config.json", huggingface.load_hf(folder)[1]
        return made[case]

    return get


def write_dcp(folder, state):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def universal(folder, case, stage, weights=None):
    """A DeepSpeed universal checkpoint of a model, as ds_to_universal makes it of one that 2 ranks saved at a ZeRO
    stage in bfloat16."""
    named = {name: p.detach() for name, p in theirs(case).named_parameters()}  # one name for a tied head
    named = {name: weights[name] if weights else t for name, t in named.items()}
    alias = dict([TIED[case]]) if case in TIED else {}
    zero = folder / "zero"
    for name, t in named.items():
        (zero / name).mkdir(parents=True)
        for what, value in (("fp32", t), ("exp_avg", t * 0.1), ("exp_avg_sq", t * t)):
            value = value.clone()
            torch.save(value.reshape(-1) if stage == 3 else {"cat_dim": 0, "param": value}, zero / name / f"{what}.pt")
        if stage < 3:
            torch.save(torch.tensor(2.0), zero / name / "step.pt")
    torch.save({"param_groups": [{"lr": 0.001}]}, zero / "optimizer_state.pt")
    if stage < 3:
        for name, first in alias.items():  # as the model computed with them
            (zero / name).mkdir()
            torch.save({"param": named[first].bfloat16().float()}, zero / name / "fp32.pt")
    shapes = [collections.OrderedDict((name, t.shape) for name, t in named.items())]
    for rank in range(2 if stage == 3 else 1):
        states = {
            "module": collections.OrderedDict(
                (name, torch.empty(0).bfloat16() if stage == 3 else t.bfloat16()) for name, t in named.items()
            ),
            "param_shapes": shapes,
            "frozen_param_shapes": None if stage == 1 else collections.OrderedDict(),
            "shared_params": alias if rank == 0 else {},
            "frozen_param_fragments": None if stage == 1 else collections.OrderedDict(),
            "ds_config": {"zero_optimization": {"stage": stage}},
            "ds_version": "0.19.8",
        }
        prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        torch.save(states, folder / f"{prefix}mp_rank_00_model_states.pt")
    return folder


def imported(folder, config, out):
    """The parameters of the run that `fzero import` makes of a folder, and the line that it says."""
    line = weights.import_weights(folder, out, config)
    held = weights.load(out)
    assert held.step == 0 and held.warnings == []
    return held, line


def expect_equal(case, known, held):
    """The parameters are theirs bit for bit, and so the logits within rounding; and `transformers` loads what we
    export."""
    model, _, params = known(case)
    assert_same(held.params, params)
    ids = tokens(2)
    with torch.no_grad():
        assert relative(logits(held.model, held.params, {"tokens": ids}, Ctx()), model(input_ids=ids).logits) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_a_folder_of_transformers(case, known, tmp_path):
    model, config, _ = known(case)
    held, line = imported(config.parent, None, tmp_path / "run")
    assert "parameters of a Hugging Face model, no tokenizer; train on with: fzero pretrain --init" in line
    expect_equal(case, known, held)
    line, passed = weights.export_hf(tmp_path / "run", tmp_path / "out")
    assert "after step 0" in line and passed == []
    again = type(model).from_pretrained(tmp_path / "out").eval()
    assert_same(dict(again.named_parameters()), dict(model.named_parameters()))
    with torch.no_grad():
        assert relative(again(input_ids=tokens(2)).logits, model(input_ids=tokens(2)).logits) < 1e-6


@pytest.mark.each_value
@pytest.mark.parametrize("prefix", ["", "model.", "app.model.", "module._orig_mod."])
@pytest.mark.parametrize("case", FAMILIES)
def test_a_torch_distributed_checkpoint(case, prefix, known, tmp_path):
    model, config, _ = known(case)
    state = {prefix + name: t for name, t in model.state_dict().items()}
    state |= {f"optim.state.{name}.exp_avg": t + 1 for name, t in state.items()} | {
        "step": 3,
        "optim.lr": torch.tensor(0.1),
    }
    held, line = imported(write_dcp(tmp_path / "dcp", state), config, tmp_path / "run")
    assert "parameters of a torch.distributed.checkpoint" in line
    expect_equal(case, known, held)


def test_names_that_wrappers_have_put_into_names(known, tmp_path):
    model, config, _ = known("llama")
    for wrapper in ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"):
        state = {re.sub(r"(layers\.\d+)\.", rf"\1.{wrapper}.", name): t for name, t in model.state_dict().items()}
        source = convert.open_source(write_dcp(tmp_path / wrapper, state), config)
        assert_same(convert.load(source), known("llama")[2])


def save_sharded(mesh, folder, case):
    """Save a model as ranks of FSDP2 hold it, but for one tensor that is split along its other dim; returns what is
    where."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, devices = theirs(case), init_device_mesh("cpu", (mesh["dp"].size,))
        for layer in model.transformer.h if case == "gpt2" else model.model.layers:
            fully_shard(layer, mesh=devices)
        fully_shard(model, mesh=devices)
        state = model.state_dict()
        name = next(name for name, t in state.items() if t.dim() == 2)
        state[name] = distribute_tensor(state[name].full_tensor(), devices, [Shard(1)])
        dcp.save(state, checkpoint_id=folder)
    return {name: [str(p) for p in t.placements] for name, t in state.items()}


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
def test_a_sharded_torch_distributed_checkpoint(case, known, tmp_path):
    placements, _ = run(2, save_sharded, str(tmp_path / "dcp"), case)
    assert {p for ps in placements.values() for p in ps} == {"S(0)", "S(1)"}
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    held, _ = imported(tmp_path / "dcp", known(case)[1], tmp_path / "run")
    expect_equal(case, known, held)


@pytest.mark.each_value
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("case", FAMILIES)
def test_a_deepspeed_universal_checkpoint(case, stage, known, tmp_path):
    folder = universal(tmp_path / "universal", case, stage)
    held, line = imported(folder, known(case)[1], tmp_path / "run")
    assert "parameters of a DeepSpeed universal checkpoint" in line
    expect_equal(case, known, held)


def test_a_universal_checkpoint_is_found_by_the_file_that_names_it(known, tmp_path):
    universal(tmp_path / "global_step2_universal", "llama", 3)
    (tmp_path / "latest_universal").write_text("global_step2_universal")
    shutil.copy(known("llama")[1], tmp_path / "config.json")
    assert_same(convert.load(convert.open_source(tmp_path)), known("llama")[2])


def test_a_frozen_parameter_of_stage_3_is_put_together(known, tmp_path):
    folder, name = universal(tmp_path / "universal", "llama", 3), "model.norm.weight"
    shutil.rmtree(folder / "zero" / name)
    weight = known("llama")[0].state_dict()[name]
    half, expected = torch.cat([weight, torch.full((2,), 9.0)]).bfloat16().chunk(2), weight.bfloat16().float()  # padded
    for rank in range(2):
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        said = torch.load(path, weights_only=True)
        del said["param_shapes"][0][name]
        torch.save(
            {**said, "frozen_param_shapes": {name: weight.shape}, "frozen_param_fragments": {name: half[rank].clone()}},
            path,
        )
    params = convert.load(convert.open_source(folder, known("llama")[1]))
    assert torch.equal(params["head"]["norm"]["scale"], expected)
    last = torch.load(path, weights_only=True)
    torch.save({**last, "frozen_param_fragments": {}}, path)
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight is frozen, and the model states have 17 of its 32 elements"
    ):
        convert.load(convert.open_source(folder, known("llama")[1]))


class Foreign:
    """A class of the program that saved a checkpoint, with arguments and a state."""

    made = 0

    def __init__(self, x=0):
        Foreign.made += 1
        self.x = x


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_objects_of_the_program_that_saved_are_passed_over(known, tmp_path):
    folder = universal(tmp_path / "universal", "llama", 3)
    path = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=True), "args": Foreign(3), "client": [Foreign()]}, path)
    before = Foreign.made
    assert_same(convert.load(convert.open_source(folder, known("llama")[1])), known("llama")[2])
    assert Foreign.made == before


def test_a_config_of_a_model_that_was_never_saved(known, tmp_path):
    """It names no architecture; beside a checkpoint its model_type will do."""
    model, config, params = known("llama")
    model.config.__class__(**{**model.config.to_dict(), "architectures": None}).save_pretrained(tmp_path)
    assert not json.loads((tmp_path / "config.json").read_text()).get("architectures")
    assert_same(
        convert.load(convert.open_source(write_dcp(tmp_path / "dcp", model.state_dict()), tmp_path / "config.json")),
        params,
    )
    assert_same(
        convert.load(convert.open_source(universal(tmp_path / "ds", "llama", 2), tmp_path / "config.json")), params
    )
    with pytest.raises(ValueError, match="architectures is \\[\\] of model_type 'llama'"):
        convert.open_source(config.parent, tmp_path / "config.json")


# ---- what is refused ----


def one_line(what, *said):
    text = str(what.value)
    assert "\n" not in text and all(part in text for part in said), text


def test_code_in_a_checkpoint_is_not_run(known, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = known("llama")[1]
    folder = universal(tmp_path / "universal", "llama", 3)
    path = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    said = torch.load(path, weights_only=True)
    torch.save({**said, "args": Harm()}, path)
    weight = folder / "zero" / "model.norm.weight" / "fp32.pt"
    torch.save({"param": torch.load(weight, weights_only=True), "more": Harm()}, weight)
    try:
        convert.open_source(folder, config)
    except ValueError as error:
        assert "\n" not in str(error)
    state = write_dcp(tmp_path / "dcp", known("llama")[0].state_dict())
    (state / ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(ValueError) as what:
        convert.open_source(state, config)
    one_line(what, ".metadata: damaged: it names posix.mkdir")
    assert not (tmp_path / "harm").exists()


NO_CONFIG = "without a config.json with the model's sizes; name it by config= (--hf-config HF_CONFIG.json"


def test_folders_that_are_no_source(known, tmp_path):
    model, config, _ = known("llama")

    def refused(folder, *said, config=config):
        with pytest.raises(ValueError) as what:
            convert.open_source(folder, config)
        one_line(what, *said)

    refused(tmp_path / "nowhere", "nowhere: no such folder")
    refused(config, "config.json: is not a folder")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(
        empty,
        "holds nothing that fzero imports; looked for model.safetensors (or its index), .metadata "
        "(torch.distributed.ch",
    )
    refused(empty, "zero/*/fp32.pt (DeepSpeed universal)")
    (empty / "latest_universal").write_text("gone")
    refused(empty, "holds nothing that fzero imports")
    (empty / "global_step2").mkdir()
    (empty / "global_step2" / "mp_rank_00_model_states.pt").touch()
    for folder in (empty, empty / "global_step2"):
        refused(
            folder,
            "a DeepSpeed checkpoint that is not universal; convert it first: python -m "
            "deepspeed.checkpoint.ds_to_universal",
        )
    refused(write_dcp(tmp_path / "dcp", model.state_dict()), f"a torch.distributed.checkpoint {NO_CONFIG}", config=None)
    refused(universal(tmp_path / "ds", "llama", 3), f"a DeepSpeed universal checkpoint {NO_CONFIG}", config=None)
    refused(tmp_path / "dcp", "other.json: no such file", config=tmp_path / "other.json")
    (tmp_path / "other.json").write_text('{"model_type": "bert"}')
    refused(
        tmp_path / "dcp",
        "other.json: architectures is [] of model_type 'bert'; fzero reads GPT2",
        config=tmp_path / "other.json",
    )
    refused(
        tmp_path / "dcp",
        "no tensor of a GPT2LMHeadModel is in it, under any prefix; there is model.",
        config=known("gpt2")[1],
    )


UP = "model.layers.1.mlp.up_proj.weight"
CHANGES = {
    "missing": (
        lambda state: {n: t for n, t in state.items() if n != UP},
        f"tensors are missing for a LlamaForCausalLM of these sizes: {UP}",
    ),
    "extra": (
        lambda state: {**state, "model.layers.0.mlp.up_proj.bias": torch.ones(3)},
        "tensors are unexpected for a LlamaForCausalLM",
    ),
    "another layer": (
        lambda state: {**state, "model.layers.2.mlp.up_proj.weight": state[UP]},
        "unexpected for a LlamaForCausalLM",
    ),
    "shape": (
        lambda state: {**state, UP: state[UP].T},
        f"tensor {UP} has shape [32, 40], config.json asks for [40, 32]",
    ),
    "dtype": (lambda state: {**state, UP: state[UP].char()}, f"tensor {UP} is torch.int8; fzero reads float32"),
    "mixed": (
        lambda state: {**state, UP: state[UP].half()},
        f"tensor {UP} is torch.float16 and other layers torch.float32",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_checkpoint_of_another_model(what, known, tmp_path):
    model, config, _ = known("llama")
    change, said = CHANGES[what]
    state = change(dict(model.state_dict()))
    with pytest.raises(ValueError) as error:
        convert.open_source(write_dcp(tmp_path / "dcp", state), config)
    one_line(error, str(tmp_path / "dcp"), said)
    # And of DeepSpeed: stage 3's elements have the shape that the model states say.
    for stage in (1, 3):
        folder = universal(tmp_path / f"ds{stage}", "llama", stage)
        shutil.rmtree(folder / "zero")
        for name, t in state.items():
            (folder / "zero" / name).mkdir(parents=True)
            torch.save(
                t.reshape(-1).clone() if stage == 3 else {"param": t.clone()}, folder / "zero" / name / "fp32.pt"
            )
        for path in folder.glob("*_model_states.pt"):
            shapes = [{name: t.shape for name, t in state.items()}]
            torch.save({**torch.load(path, weights_only=True), "param_shapes": shapes}, path)
        with pytest.raises(ValueError) as error:
            convert.open_source(folder, config)
        one_line(error, str(folder), said)


def test_two_models_in_one_checkpoint_are_not_chosen_between(known, tmp_path):
    model, config, _ = known("llama")
    state = {f"{prefix}.{name}": t for prefix in ("ema", "model") for name, t in model.state_dict().items()}
    with pytest.raises(ValueError) as what:
        convert.open_source(write_dcp(tmp_path / "dcp", state), config)
    one_line(
        what, "more than one model are in it, as ema.model.embed_tokens.weight and model.model.embed_tokens.weight say"
    )
    del state["ema.model.norm.weight"]  # not a whole one
    assert_same(convert.load(convert.open_source(write_dcp(tmp_path / "one", state), config)), known("llama")[2])


def test_a_falsely_tied_head(known, tmp_path):
    model, config, _ = known("llama-tied-scaled")
    state = {**model.state_dict(), "lm_head.weight": model.state_dict()["lm_head.weight"] * 2}
    with pytest.raises(ValueError) as what:
        convert.open_source(write_dcp(tmp_path / "dcp", state), config)
    one_line(what, "the config says tie_word_embeddings, but lm_head.weight is not model.embed_tokens.weight")


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)


def place_of(path, t):
    """Where the bytes of a tensor are in a file."""
    at = path.read_bytes().find(t.detach().contiguous().numpy().tobytes())
    assert at > 0
    return at + 5


@pytest.mark.parametrize("how", ["flipped", "cut", "gone", "metadata cut", "metadata none"])
def test_a_damaged_torch_distributed_checkpoint(how, known, tmp_path):
    model, config, _ = known("llama")
    folder = write_dcp(tmp_path / "dcp", model.state_dict())
    (data,), metadata, name = folder.glob("*.distcp"), folder / ".metadata", UP
    if how == "flipped":
        flip(data, place_of(data, model.state_dict()[name]))
        said = [f"__0_0.distcp: damaged: Bad CRC-32 for file 'archive/data/0' (tensor {name})"]
    elif how == "cut":
        with open(data, "r+b") as f:
            f.truncate(data.stat().st_size - 100)
        said = ["__0_0.distcp: damaged: ", "(tensor "]
    elif how == "gone":
        data.unlink()
        said = ["__0_0.distcp: no such file, but tensor "]
    elif how == "metadata cut":
        metadata.write_bytes(metadata.read_bytes()[:-50])
        said = [".metadata: damaged: "]
    else:
        metadata.write_bytes(pickle.dumps({"a": 1}))
        said = [".metadata: damaged: it is not the metadata of a checkpoint"]
    with pytest.raises(ValueError) as what:
        weights.import_weights(folder, tmp_path / "run", config)
    one_line(what, *said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "how", ["flipped", "cut", "empty", "no tensor", "of another size", "no states", "damaged states", "other states"]
)
def test_a_damaged_universal_checkpoint(how, known, tmp_path):
    model, config, _ = known("llama")
    folder = universal(tmp_path / "universal", "llama", 3)
    path, states = folder / "zero" / UP / "fp32.pt", sorted(folder.glob("*_model_states.pt"))
    if how == "flipped":
        flip(path, place_of(path, model.state_dict()[UP]))
        said = [f"{path}: damaged: Bad CRC-32 for file 'fp32/data/0'"]
    elif how == "cut":
        with open(path, "r+b") as f:
            f.truncate(path.stat().st_size // 2)
        said = [f"{path}: damaged, or not what torch.save writes: "]
    elif how == "empty":
        path.write_bytes(b"")
        said = [f"{path}: damaged, or not what torch.save writes: "]
    elif how == "no tensor":
        torch.save({"step": 2}, path)
        said = [f"{path}: no tensor in it; a universal checkpoint has one here, or one under 'param'"]
    elif how == "of another size":
        torch.save(torch.zeros(7), path)
        said = [f"{path}: 7 elements, and the model states have the shape [40, 32]"]
    elif how == "no states":
        for file in states:
            file.unlink()
        said = [": elements without a shape, and no *_model_states.pt in "]
    elif how == "other states":
        torch.save({"param_shapes": 3}, states[0])
        said = [f"{states[0]}: damaged, or not the model states of DeepSpeed (TypeError: "]
    else:
        flip(states[0], 200)
        states[0].write_bytes(states[0].read_bytes()[:500])
        said = [f"{states[0]}: damaged, or not what torch.save writes: "]
    with pytest.raises(ValueError) as what:
        weights.import_weights(folder, tmp_path / "run", config)
    one_line(what, *said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "file", ["__0_0.distcp", ".metadata", "zero/model.norm.weight/fp32.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"]
)
def test_a_flipped_bit_is_refused_or_changes_nothing(file, known, tmp_path):
    model, config, params = known("llama")
    folder = (
        universal(tmp_path / "ds", "llama", 3)
        if file.endswith(".pt")
        else write_dcp(tmp_path / "dcp", model.state_dict())
    )
    path, refused = folder / file, 0
    content, draw = path.read_bytes(), random.Random(0)
    for _ in range(60):
        at = draw.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :])
        try:
            found = convert.load(convert.open_source(folder, config))
        except ValueError as error:
            assert "\n" not in str(error) and str(folder) in str(error)
            refused += 1
        else:
            assert_same(found, params)
    assert refused > 10


class ByAttribute(pickle.Pickler):
    """A pickler that writes the members of enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


class Attribute:
    def __reduce__(self):
        return getattr, (dcp.metadata.Metadata, "__init__")


def test_enums_as_other_pythons_pickle_them(known, tmp_path):
    model, config, _ = known("llama")
    folder = write_dcp(tmp_path / "dcp", model.state_dict())
    expected = convert.load(convert.open_source(folder, config))
    said = pickle.loads((folder / ".metadata").read_bytes())
    with (folder / ".metadata").open("wb") as file:
        ByAttribute(file).dump(said)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert_same(convert.load(convert.open_source(folder, config)), expected)
    (folder / ".metadata").write_bytes(pickle.dumps(Attribute()))
    with pytest.raises(ValueError) as what:
        convert.open_source(folder, config)
    one_line(what, "damaged: it asks for '__init__' of what is no enum that has it")


def test_chunks_that_overlap(known, tmp_path):
    """As many elements as the tensor has, but not each once."""
    run(2, save_sharded, str(tmp_path / "dcp"), "llama")
    path = tmp_path / "dcp" / ".metadata"
    said = pickle.loads(path.read_bytes())
    first, second = said.state_dict_metadata[UP].chunks
    index = dcp.metadata.MetadataIndex(UP, second.offsets)
    place = said.storage_data.pop(index)
    second.offsets = torch.Size([first.offsets[0] + 1, *first.offsets[1:]])
    said.storage_data[dcp.metadata.MetadataIndex(UP, second.offsets)] = place
    path.write_bytes(pickle.dumps(said))
    with pytest.raises(ValueError) as what:
        convert.load(convert.open_source(tmp_path / "dcp", known("llama")[1]))
    one_line(what, f"tensor {UP} cannot be read: two of its chunks overlap, one from [1, 0] on")
    del said.state_dict_metadata[UP].chunks[1]
    path.write_bytes(pickle.dumps(said))
    with pytest.raises(ValueError) as what:
        convert.load(convert.open_source(tmp_path / "dcp", known("llama")[1]))
    one_line(what, f"tensor {UP} has 1280 elements, and chunks of 640; the checkpoint is not whole")


def test_the_command_line(known, tmp_path, capsys):
    model, config, _ = known("llama")
    folder = write_dcp(tmp_path / "dcp", {"model": model.state_dict()})

    def fzero(*args):
        with pytest.raises(SystemExit) as ended:
            main.main([str(arg) for arg in args])
        return ended.value.code, *capsys.readouterr()

    code, _, err = fzero("import", folder, "--out", tmp_path / "run")
    assert code == 2 and err.count("\n") == 1 and NO_CONFIG in err and not (tmp_path / "run").exists()
    code, out, err = fzero("import", folder, "--hf-config", config, "--out", tmp_path / "run")
    assert (code, err) == (0, "") and "parameters of a torch.distributed.checkpoint, no tokenizer" in out
    code, _, err = fzero("import", folder, "--hf-config", config, "--out", tmp_path / "run")
    assert code == 2 and "exists and is not empty" in err
    code, out, err = fzero("export", tmp_path / "run", "--out", tmp_path / "hf")
    assert (code, err) == (0, "") and "after step 0" in out
    assert_same(huggingface.load_hf(tmp_path / "hf")[1], known("llama")[2])


def test_export_passes_over_a_damaged_checkpoint_and_says_so(known, tmp_path, capsys):
    _, config, params = known("llama")
    weights.import_weights(config.parent, tmp_path / "run")
    later = pytree.map(lambda t: t + 1, params)
    path = checkpoint.save(tmp_path / "run" / "checkpoints", {"params": later}, step=7)
    file = max((p for p in Path(path).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    flip(file, file.stat().st_size // 2)
    with pytest.raises(SystemExit) as ended:
        main.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    out, err = capsys.readouterr()
    assert ended.value.code == 0 and "after step 0" in out
    assert err.count("\n") == 1 and "passed over" in err and "step-00000007" in err and "is damaged" in err
    assert_same(huggingface.load_hf(tmp_path / "out")[1], params)


# ---- memory ----


@pytest.mark.exhaustive
def test_the_model_is_never_in_memory(tmp_path):
    """Import from each kind of folder, and export, of a model of 220 MB, whose largest leaf has 46 MB: in a process of
    their own."""
    script = Path(__file__).with_name("migrate_worker.py")
    # The allocator gives back at once what is freed: what it would keep for later is not counted as needed.
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "1000000",
        "MALLOC_TRIM_THRESHOLD_": "1000000",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {what: int(peak) for what, peak in (line.split() for line in done.stdout.splitlines())}
    whole, leaf, buffers = found.pop("whole"), found.pop("leaf"), weights.BUFFER_BYTES
    slack = 45_000_000  # a tensor of theirs, twice; what threads and the first use of things need
    assert set(found) == {"hf", "dcp", "universal", "export"} and whole > 1.3 * (leaf + buffers + slack)
    assert max(found["hf"], found["dcp"], found["universal"]) < leaf + buffers + slack, found
    assert found["export"] < 25_000_000, found


# ---- the real thing ----


def form(value):
    """What a file of DeepSpeed is made of, without its values."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape)
    return {key: form(inner) for key, inner in value.items()} if isinstance(value, dict) else type(value).__name__


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(
    ("case", "stage", "frozen"),
    [("llama-tied-scaled", 2, ""), ("llama-tied-scaled", 3, ""), ("gpt2", 1, ""), ("mixtral", 3, "")]
    + [("llama", stage, "model.norm.weight") for stage in (1, 2, 3)],
)
def test_the_real_deepspeed(case, stage, frozen, tmp_path):
    worker = [Path(__file__).with_name("deepspeed_worker.py"), case, stage, tmp_path, *[frozen] * bool(frozen)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *map(str, worker)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    real, truth = tmp_path / "universal", torch.load(tmp_path / "truth.pt", weights_only=True)
    source = convert.open_source(tmp_path)
    assert source.kind == "DeepSpeed universal checkpoint"
    params = convert.load(source)
    model = theirs(case)
    assert set(truth) == {name for name, _ in model.named_parameters()} - {frozen}
    if frozen:
        truth[frozen] = dict(model.named_parameters())[frozen].detach().bfloat16().float()
    model.load_state_dict(truth, strict=False)
    assert_same(params, huggingface.load_hf(save(model, tmp_path / "hf"))[1])
    with torch.no_grad():
        ours = logits(models.build(source.config), params, {"tokens": tokens(2)}, Ctx())
        assert relative(ours, model(input_ids=tokens(2)).logits) < 1e-5
    if frozen:
        return
    # What is made above is what the tool makes.
    made = universal(tmp_path / "made", case, stage, truth)
    names = {p.relative_to(made) for p in made.rglob("*.pt")}
    assert names == {p.relative_to(real) for p in real.rglob("*.pt")}
    for name in sorted(names - {Path("zero", "optimizer_state.pt")}):
        ours, its = (torch.load(folder / name, weights_only=True) for folder in (made, real))
        if name.name.endswith("model_states.pt"):
            for key in set(ours) - {"ds_config"}:
                assert form(ours[key]) == form(its[key]) or key == "module", (name, key)
            assert [{k: tuple(v) for k, v in group.items()} for group in ours["param_shapes"]] == [
                {k: tuple(v) for k, v in group.items()} for group in its["param_shapes"]
            ]
            assert ours["shared_params"] == its["shared_params"]
        elif name.name == "fp32.pt":
            assert form(ours) == form(its), name
            assert torch.equal(*(x["param"] if isinstance(x, dict) else x for x in (ours, its))), name
        else:
            assert form(ours) == form(its), name

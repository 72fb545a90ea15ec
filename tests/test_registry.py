"""The registry: which form serves a call, why not the others, and forms of one's own."""

import json
from types import SimpleNamespace

import pytest
import torch

from fzero.core import gpu
from fzero.kernels import Kernels, Op, registry, tuning


@pytest.fixture
def square(monkeypatch):
    """An operation with a form for long vectors, and one that auto stands back from."""
    monkeypatch.setattr(registry, "FILES", ("glu",))
    monkeypatch.setattr(registry, "OPS", dict(registry.OPS))
    return Op(
        "square",
        lambda x, power=2: x**power,
        registry.Form(
            "long",
            lambda x, power=2: (x * x).detach(),
            lambda x, power=2: "" if len(x) > 3 else f"{len(x)} elements; it takes 4",
        ),
        registry.Form("slow", lambda x, power=2: x * x, prefers=lambda x, power=2: "twice as slow", composes=True),
        flops=lambda x, power=2: x.numel(),
        bytes=lambda x, power=2: 8 * x.numel(),
    )


def test_auto_takes_the_first_form_that_serves(square):
    said = registry.explain("square", torch.ones(4))
    assert (said.chosen, said.reasons, said.flops, said.bytes) == ("long", {}, 4, 32)
    said = registry.explain("square", torch.ones(1000, device="meta")[:3], power=2)
    assert said.chosen == "reference" and said.reasons == {"long": "3 elements; it takes 4", "slow": "twice as slow"}
    assert str(said) == (
        "square: reference (3 FLOP, 24 bytes at least)\n  not long: 3 elements; it takes 4\n  not slow: twice as slow"
    )
    assert registry.explain("square", torch.ones(3), impl="slow").chosen == "slow"
    assert registry.explain("square", torch.ones(4), impl="reference").chosen == "reference"


def test_what_is_asked_for_is_what_one_gets(square):
    with pytest.raises(
        ValueError, match="square: impl='long' does not serve this call: 3 elements; it takes 4; use auto or reference"
    ):
        square(torch.ones(3), impl="long")
    with pytest.raises(
        ValueError,
        match=r"square: impl is 'lonk' \(did you mean long\?\); it must be one of auto, reference, long, slow",
    ):
        square(torch.ones(3), impl="lonk")
    with pytest.raises(ValueError, match="there is no operation 'sqare'"):
        registry.explain("sqare", torch.ones(3))


def test_what_is_differentiated_once_is_not_taken_under_vmap_or_for_second_derivatives(square):
    x = torch.arange(5.0)
    assert not square(
        x.clone().requires_grad_()
    ).requires_grad  # the first form, which drops the gradient to be seen here
    assert torch.equal(
        torch.func.grad(torch.func.grad(lambda x: square(x * torch.ones(5)).sum()))(torch.tensor(2.0)),
        torch.tensor(10.0),
    )
    assert torch.equal(torch.vmap(lambda row: square(row))(x.expand(2, 5)), (x * x).expand(2, 5))
    with pytest.raises(ValueError, match="differentiated once at most, and not under vmap"):
        torch.vmap(lambda row: square(row, impl="long"))(x.expand(2, 5))


def test_a_form_of_one_s_own_comes_first(square):
    registry.register(
        "square",
        registry.Form("mine", lambda x, power=2: x * x + 0.0, lambda x, power=2: "" if power == 2 else "squares only"),
    )
    assert registry.explain("square", torch.ones(4)).chosen == "mine"
    assert registry.explain("square", torch.ones(4), power=3).reasons["mine"] == "squares only"
    registry.register("square", registry.Form("mine", lambda x, power=2: x, lambda x, power=2: "never"))
    assert [form.name for form in square.forms] == ["mine", "long", "slow"]
    assert registry.explain("square", torch.ones(4)).chosen == "long"


def test_choices_are_a_value(square):
    kernels = Kernels.parse("reference, square=slow")
    assert (kernels["square"], kernels["swiglu"]) == ("slow", "reference")
    assert Kernels.parse(str(kernels)) == kernels and str(Kernels.parse("")) == "auto" == Kernels()["square"]
    for text, said in (
        ("square=fast", "it must be one of auto, reference, long, slow"),
        ("sqare=slow", "there is no operation 'sqare'"),
        ("slow", "neither auto, reference, canonical nor OPERATION=FORM"),
    ):
        with pytest.raises(ValueError, match=said):
            Kernels.parse(text)


def test_what_was_used_is_seen(square):
    with registry.observe() as used:
        square(torch.ones(4)), square(torch.ones(3))
        with registry.observe() as inner:
            square(torch.ones(4))
    square(torch.ones(4), impl="slow")
    assert used == {"square": {"long", "reference"}} and inner == {"square": {"long"}}
    assert registry.describe(used) == "square=long+reference"


# ---- configurations


def test_a_tuned_configuration_is_kept_for_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "_LOADED", {})
    monkeypatch.setattr(tuning, "cache_file", tuning.cache_file.__wrapped__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpu, "properties", lambda device: SimpleNamespace(name="NVIDIA H200 (x)"))
    device, default, shape = torch.device("cuda"), {"BLOCK": 1}, (4096, torch.bfloat16)
    candidates = [{"BLOCK": 64, "num_warps": 4}, {"BLOCK": 128, "num_warps": 8}, {"BLOCK": 256, "num_warps": 8}]
    seconds = {64: 3.0, 128: 1.0, 256: float("inf")}
    assert tuning.config("norm", shape, default, device) == default
    assert tuning.tune("norm", shape, candidates, lambda config: seconds[config["BLOCK"]], device) == candidates[1]
    assert tuning.config("norm", shape, default, device) == candidates[1]
    assert tuning.config("norm", (4096, torch.float32), default, device) == default
    assert tuning.config("norm", shape, default, torch.device("cpu")) == default
    path = tuning.cache_file(device)
    assert path.parent == tmp_path / "fzero" / "kernels" and path.name.startswith("NVIDIA-H200-x-triton-")
    assert json.loads(path.read_text()) == {"norm 4096 torch.bfloat16": candidates[1]}
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    monkeypatch.setattr(tuning, "_LOADED", {})  # as in another process
    assert tuning.config("norm", shape, default, device) == candidates[1]
    path.write_text("{")
    monkeypatch.setattr(tuning, "_LOADED", {})
    with pytest.raises(ValueError, match=r"not JSON \(.*\); remove it, and tune again"):
        tuning.config("norm", shape, default, device)
    with pytest.raises(ValueError, match="no configuration to try"):
        tuning.tune("norm", shape, [], lambda config: 0.0, device)


def test_a_search_times_copies_and_launches_the_fastest(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "_LOADED", {})
    monkeypatch.setattr(tuning, "cache_file", lambda device: tmp_path / "device.json")
    ran = []

    class Kernel:  # stands for a compiled kernel: adds 1 in place
        __name__ = "add"

        def __getitem__(self, grid):
            return lambda x, **config: ran.append((grid, config["BLOCK"])) or x.add_(1)

    def bench(run, return_mode):
        run()
        return {64: 2.0, 128: 1.0}[ran[-1][1]]

    x = torch.zeros(3)
    monkeypatch.setattr(tuning.triton.testing, "do_bench", bench)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"))
    configs = [{"BLOCK": 64}, {"BLOCK": 128}]

    def launch():
        tuning.launch(Kernel(), lambda config: (config["BLOCK"] // 64,), (x,), configs, shape=(3,))

    launch()
    assert ran == [((1,), 64)]  # the default, and no clock
    with tuning.searching():
        launch()
        launch()
    launch()
    assert ran[1:] == [((1,), 64), ((2,), 128), ((2,), 128), ((2,), 128), ((2,), 128)]
    assert x.tolist() == [4.0] * 3


def test_block_sizes_are_those_of_the_chip(tmp_path, monkeypatch):
    """The chip's file before the default one, and what was measured here before both."""
    monkeypatch.setattr(tuning, "_LOADED", {})
    monkeypatch.setattr(tuning, "cache_file", lambda device: tmp_path / "device.json")
    rows = {"_glu": [{"BLOCK": 4096, "num_warps": 8}]}
    other = {"names": "B200", "blocks": {"rows": rows}}
    found = {**tuning.listed(), "other": other}
    monkeypatch.setattr(tuning, "listed", lambda: found)
    table, device = tuning.ConfigTable("_glu"), torch.device("cuda")
    for gpu_name, first in (("NVIDIA H200", 1024), ("NVIDIA B200", 4096), ("NVIDIA L40S", 1024)):
        monkeypatch.setattr(gpu, "properties", lambda device, name=gpu_name: SimpleNamespace(name=name))
        assert tuning.rows(table, device)[0]["BLOCK"] == first
    assert tuning.rows(table, torch.device("cpu")) == table
    assert tuning.rows(rows["_glu"], device) == rows["_glu"]  # a list that follows from shapes


def test_every_row_of_a_chip_has_the_constants_of_the_default_one():
    """So a file of another chip names no kernel and no block size that is not there."""
    default = tuning.listed()[tuning.DEFAULT]["blocks"]["rows"]
    for name, chip in tuning.listed().items():
        blocks = chip.get("blocks", {"rows": {}, "source": "-"})
        assert blocks["source"]
        for kernel, configs in blocks["rows"].items():
            assert configs and all(set(config) == set(default[kernel][0]) for config in configs), (name, kernel)

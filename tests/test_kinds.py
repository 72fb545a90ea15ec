"""Public functions hold their callers to their type hints: another kind is one line that names the argument."""

import dataclasses
import inspect
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from test_docstrings import PUBLIC

import fzero
from fzero import data, models, optim
from fzero.core import WrongKind, arguments, checked

OBJECT = object()
# Functions that are called with every tensor of a step, or inside of one, and say nothing of their own.
WITHIN_A_STEP = {
    "fzero.all_gather", "fzero.all_to_all", "fzero.ppermute", "fzero.psum", "fzero.psum_scatter", "fzero.pvary",
    "fzero.stack", "fzero.redistribute", "fzero.optim.apply_in_place", "fzero.optim.apply_updates",
    "fzero.optim.decay_matrices", "fzero.optim.global_norm", "fzero.models.logits",
    "fzero.models.loss", "fzero.sharding.local_shape", "fzero.sharding.narrow_to", "fzero.sharding.from_dtensor",
    "fzero.sharding.to_dtensor", "fzero.generate.draw", "fzero.generate.draw_rows", "fzero.generate.score",
    "fzero.generate.lookup",
}  # fmt: skip
# Those that check all of their arguments themselves, or have none.
THEMSELVES = {
    "fzero.bf16", "fzero.fp16", "fzero.fp32", "fzero.fp64", "fzero.one_process", "fzero.optim.chain",
    "fzero.models.deepseek", "fzero.models.gpt2", "fzero.models.llama", "fzero.models.mixtral", "fzero.models.mlp",
}  # fmt: skip
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
MORE = (
    "prepare",
    "link",
    "fill_in_middle",
    "corrupt_spans",
    "weigh_targets",
    "open_tokens",
    "read_meta",
    "verify",
    "eval_batches",
    "from_loader",
    "load_tokenizer",
)
FUNCTIONS |= {f"fzero.data.{name}": getattr(data, name) for name in MORE}
CHECKED = sorted(FUNCTIONS.keys() - WITHIN_A_STEP - THEMSELVES)


@pytest.mark.parametrize("name", CHECKED)
def test_every_public_function_refuses_another_kind_of_each_argument(name):
    function = FUNCTIONS[name]
    own = getattr(function, arguments.SELF_CHECKED, None)
    assert own is not None, f"{name}: write @checked() above it, or name it in this file"
    hints = {n: hint for n, hint in arguments.hints_of(inspect.unwrap(function)).items() if n not in own}
    for argument, hint in hints.items():
        if arguments.as_hinted(OBJECT, hint) is not arguments.NO:
            continue  # Any
        with pytest.raises(WrongKind, match=rf"^{function.__name__}: {argument} is a object; it must be ") as caught:
            function(**{argument: OBJECT})
        assert "\n" not in str(caught.value)
    assert arguments.hints_of(inspect.unwrap(function)).keys() >= own - {"options"}, "a name that is no argument"


def test_the_lists_of_this_file_have_no_name_too_many():
    assert {*WITHIN_A_STEP, *THEMSELVES} <= FUNCTIONS.keys()
    assert not [name for name in (*WITHIN_A_STEP, *THEMSELVES) if hasattr(FUNCTIONS[name], arguments.SELF_CHECKED)]


VALUES = (
    models.LlamaConfig(), models.GPT2Config(), models.MLPConfig(), models.MoEConfig(), models.DeepSeekConfig(),
    models.RopeScaling(), fzero.Execution(), fzero.Remat(), fzero.LossScale(), fzero.bf16(), fzero.Skip(),
    fzero.Spike(),
)  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_field_of_a_public_value_is_of_its_kind(value):
    for field in dataclasses.fields(value):
        with pytest.raises((TypeError, ValueError), match=rf"\b{field.name}\b") as caught:
            dataclasses.replace(value, **{field.name: OBJECT})
        assert "\n" not in str(caught.value) and "object at 0x" not in str(caught.value)
    for field in dataclasses.fields(value):
        if type(given := getattr(value, field.name)) is int:
            same = dataclasses.replace(value, **{field.name: np.int64(given)})
            assert same == value and type(getattr(same, field.name)) is int


FITS = [
    (1, int, 1), (np.int64(3), int, 3), (np.float32(0.5), float, 0.5), (2, float, 2), (True, bool, True),
    (np.bool_(True), bool, True), ("x", str | None, "x"), (None, str | None, None), ([1, 2], tuple[int, ...], (1, 2)),
    ([np.int64(1)], Sequence[int], [1]), ({"a": 1}, Mapping[str, int], {"a": 1}), (len, Callable[[int], int], len),
    (Path("p"), str | Path, Path("p")), ("a", typing.Literal["a", "b"], "a"), (OBJECT, typing.Any, OBJECT),
    (torch.float32, torch.dtype | None, torch.float32), ((1, "x"), tuple[int, str], (1, "x")),
]  # fmt: skip
DIFFER = [
    (True, int), (True, float), (1, bool), (0.5, int), ("1", int), (None, int), (np.float64(1.0), int), (3, str),
    ("ab", Sequence[str]), (b"ab", Iterable[int]), ({"a": "x"}, Mapping[str, int]), ([1, "x"], Sequence[int]),
    ((1, 2), tuple[int, int, int]), (3, Callable[[], int]), (int, torch.dtype), ("float32", torch.dtype),
    (torch.ones(1), float), (np.ones(2), float), (3, str | Path), ("c", typing.Literal["a", "b"]),
]  # fmt: skip


@pytest.mark.parametrize(("value", "hint", "result"), FITS, ids=[str(hint) for _, hint, _ in FITS])
def test_a_value_of_its_kind_is_returned(value, hint, result):
    found = arguments.as_hinted(value, hint)
    assert found == result and type(found) is type(result)


@pytest.mark.parametrize(
    ("value", "hint"), DIFFER, ids=[f"{type(value).__name__} for {hint}" for value, hint in DIFFER]
)
def test_a_value_of_another_kind_is_not(value, hint):
    assert arguments.as_hinted(value, hint) is arguments.NO and arguments.describe_hint(hint)


def test_the_first_wrong_item_is_named():
    @checked()
    def function(rules: Sequence[tuple[str, float]], by: Mapping[str, int] = {}, *rest: int, **more: int) -> None: ...

    with pytest.raises(WrongKind, match=r"function: rules\[1\] is \('b', 'c'\); it must be \(a text, a number\)$"):
        function([("a", 1.0), ("b", "c")])
    with pytest.raises(WrongKind, match=r"function: by\['k'\] is 'v'; it must be a whole number$"):
        function([], {"k": "v"})
    assert function([], {}, 1, any_name=2) is None


W = {"w": torch.ones(1)}
PLAN = fzero.zero_plan(0, W, fzero.one_process())
TOKENS = torch.zeros(1, 2, dtype=torch.int64)
CTX = models.Ctx()
HF_BATCH = {"tokens": TOKENS, "targets": TOKENS, "attention_mask": torch.ones(1, 2)}


def quantised():
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


WRONG_NUMBERS = {  # accepted before without a word
    "whole numbers for moments": (lambda: optim.adamw(state_dtype=torch.int32), "state_dtype is torch.int32"),
    "a policy of whole numbers": (lambda: dataclasses.replace(fzero.bf16(), param=torch.int8), "param is torch.int8"),
    "no": (lambda: optim.sgd(0.1, 0.9, nesterov="no"), "nesterov is 'no'; it must be True or False"),
    "false": (lambda: models.LlamaConfig(tied="false"), "tied is 'false'"),
    "a key of floats": (lambda: fzero.init_state(W, optim.sgd(0.1), PLAN, seed=torch.ones(2)), "seed has shape"),
    "a vector of rates": (lambda: optim.adamw(torch.ones(2)), "lr has shape"),
    "a function as decay": (lambda: optim.adamw(weight_decay=len), "weight_decay is a builtin_function"),
    "a broken regex": (lambda: optim.muon(stacked="("), r"stacked '\(' is not a regular expression"),
    "a quantised leaf": (
        lambda: fzero.zero_plan(0, {"w": quantised()}, fzero.one_process()),
        "leaf 'w' of the parameters is torch.qint8; give a plain tensor",
    ),
    "a leaf without values": (
        lambda: fzero.init_state({"w": torch.ones(1, device="meta")}, optim.sgd(0.1), PLAN, seed=0),
        "leaf 'w' of the parameters is on the meta device and has no values",
    ),
    "tokens of bytes": (
        lambda: models.loss(models.mlp(models.MLPConfig()), {}, {"tokens": TOKENS.byte(), "targets": TOKENS}, CTX),
        r"batch\['tokens'\] is torch.uint8; it must be int64",
    ),
    "Hugging Face's mask": (
        lambda: models.loss(models.mlp(models.MLPConfig()), {}, HF_BATCH, CTX),
        r"batch\['attention_mask'\] is not read; call it 'mask'",
    ),
}


@pytest.mark.parametrize("name", WRONG_NUMBERS)
def test_what_would_make_wrong_numbers_without_a_word(name):
    call, match = WRONG_NUMBERS[name]
    with pytest.raises((TypeError, ValueError), match=match):
        call()


@pytest.mark.parametrize("schedule", [lambda step: 0.5, lambda step: 1, lambda step: torch.tensor(0.5)])
def test_a_schedule_of_ones_own_returns_a_number_or_a_scalar(schedule):
    params = {"w": torch.ones(2)}
    for tx in (optim.sgd(schedule), optim.adamw(schedule, weight_decay=0.0), optim.lion(schedule)):
        updates, _ = tx.update({"w": torch.ones(2)}, tx.init(params), params)
        assert torch.allclose(updates["w"], -torch.as_tensor(schedule(0)).float())


@pytest.mark.parametrize("result", [None, "x", torch.ones(2)])
def test_a_schedule_that_returns_another_thing_is_named(result):
    tx, params = optim.sgd(lambda step: result), {"w": torch.ones(2)}
    with pytest.raises(ValueError, match="the schedule of the learning rate returned"):
        tx.update({"w": torch.ones(2)}, tx.init(params), params)

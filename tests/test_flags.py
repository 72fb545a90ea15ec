"""Flags and settings, as click and the config's schema list them: a number is taken, or refused by its value
and a bound that it violates; a flag that does nothing without something is refused without it."""

import dataclasses
import itertools
import math
import re
import types
import typing

import click
import pytest

from fzero.cli import main
from fzero.cli.flags import SHORTHANDS, Flag, Number
from fzero.core import Within, metadata_of
from fzero.models import FAMILIES, WRAPPERS, config_values
from fzero.run import RunConfig

VALUES = (
    "-1", "0", "0.5", "1e-300", "1e30", "1e300", str(10**12), str(2**31), str(2**63 - 1), str(2**63), str(2**64),
    "inf", "-inf", "nan", "", "x", "1e", "0x10", "1_000",
)  # fmt: skip
BOUNDS = {f"model.{name}": bounds for name, bounds in config_values.BOUNDS.items()} | {
    name: mark.bounds for name, marks in metadata_of(RunConfig).items() for mark in marks if isinstance(mark, Within)
}
STRIDE = 7  # of the cases that the slow tier runs; the exhaustive one runs all
NUMBER = r"(-?[\d.]+(?:e[-+]?\d+|\^\d+)?)"
BOUND = re.compile(rf"it must be (at least|above) {NUMBER}(?:,? and (below|at most|a finite number) ?{NUMBER}?)?$")
BESIDE = re.compile(r"it must be (one of|even|from|in \[|(above|below|at most) [a-z])")  # of what it does not go with
UNREAD = ("is not a valid", "a whole number", "must be a number", "is not a TOML value", "does not fit into 64 bits")
NUMBERS = Number | click.types.IntParamType | click.types.FloatParamType
# What a command gets besides what it requires, so that an accepted number meets a folder that is not there.
AND = {"pretrain": ("--data", "missing", "--out", "run"), "plan": ("--model", "mlp-tiny")}
AND["finetune"] = (*AND["pretrain"], "--init", "missing")


def commands(group=main.cli, words=()):
    """(words, command) of each command."""
    if not isinstance(group, click.Group) or group.invoke_without_command:
        yield words, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*words, name))


def flags():
    """(words, command, option) of each option whose value is a number."""
    return [(words, command, option) for words, command in commands() for option in command.params
            if isinstance(option.type, NUMBERS)]  # fmt: skip


def line_without(option, words, command):
    """The words of a command line that has all that it requires but `option`."""
    line = [*words, *AND.get(words[-1], ())]
    for param in command.params:
        if isinstance(param, click.Argument):
            line.append("missing")
        elif param.required and param is not option:
            value = "1" if isinstance(param.type, NUMBERS) else (getattr(param.type, "choices", None) or ["missing"])[0]
            line += [param.opts[0], value]
    return line


def is_number(hint):
    return bool({int, float} & set(typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)))


def entries(kind=RunConfig, where=""):
    """The dotted names of the numbers of a config, without those of its model."""
    for name, hint in typing.get_type_hints(kind).items():
        tables = [part for part in (*typing.get_args(hint), hint) if dataclasses.is_dataclass(part)]
        if is_number(hint):
            yield f"{where}{name}"
        elif name != "model":
            yield from itertools.chain.from_iterable(entries(table, f"{where}{name}.") for table in tables)


def sizes():
    """{name of a number of a model: the settings of a model that has it, without it}."""
    found = {}
    for family, kind in (FAMILIES | WRAPPERS).items():
        hints, needed = typing.get_type_hints(kind), {"model.family": family, "preset": "''"}
        for field in dataclasses.fields(kind):
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                word = "8" if is_number(hints[field.name]) else "'x'"
                needed[f"model.{field.name}"] = "{family = 'llama'}" if field.name == "base" else word
        for name in (f"model.{name}" for name, hint in hints.items() if is_number(hint)):
            found.setdefault(name, [f"{key}={value}" for key, value in needed.items() if key != name])
    return found


SIZES = sizes()
ENTRIES = [*entries(), *SIZES]
CONFIGURED = [words for words, command in commands() if any(p.name == "settings" for p in command.params)]


def readings(value):
    """The numbers that a text may be read as, and [] if none."""
    found = []
    for read in (int, float, lambda text: int(text, 0)):
        try:
            found.append(read(value))
        except ValueError:
            continue
    return found


def refused(fz, line, names, value):
    """The match of BOUND in the answer to a command line, None if it does not refuse the number. Raises AssertionError
    for an answer that is neither a result nor one line with the value and a bound that it violates."""
    code, _, err = fz(*line)
    lines = [each for each in err.splitlines() if not each.startswith(("fzero: the trace", "first estimate"))]
    assert code in (0, 2) and "Traceback" not in err and "fault of fzero" not in err, (line, code, err)
    if code == 0:
        return None
    assert lines[-1].startswith("fzero: error: ") and err.count("fzero: error:") == 1, (line, err)
    said = lines[-1]
    if not any(re.search(rf"(^|\W){re.escape(name)}\W", said) for name in names):
        return None  # of the folder that is not there
    numbers, bound = readings(value), BOUND.search(said)
    if bound is None and numbers and ("it must be" not in said or BESIDE.search(said)):
        return None  # of what the number does not go with
    shown = {value, *(text for n in numbers for text in (repr(n), f"{n:g}", f"{n:,}"))}
    assert any(text in said for text in shown), (line, said)
    unread = any(words in said for words in UNREAD)
    assert unread if bound is None else any(violates(number, bound) for number in numbers), (line, said)
    return bound


def number_of(text):
    return float(2 ** int(text[2:])) if text.startswith("2^") else float(text)


def violates(number, bound):
    """Whether a number is outside of what a refusal says of it."""
    least, low, most, high = bound.groups()
    inside = number >= number_of(low) if least == "at least" else number > number_of(low)
    if most == "a finite number":
        inside = inside and math.isfinite(number)
    elif most:
        inside = inside and (number < number_of(high) if most == "below" else number <= number_of(high))
    return not inside


def edges(bound, whole):
    """The outermost numbers that a refusal says are allowed, as texts. whole: whether they are whole numbers."""
    least, low, most, high = bound.groups()
    low = number_of(low)
    found = [low if least == "at least" else low + 1 if whole else math.nextafter(low, math.inf)]
    if most in ("below", "at most"):
        high = number_of(high)
        found.append(high if most == "at most" else int(high) - 1 if whole else math.nextafter(high, 0))
    return [str(int(number)) if whole else repr(number) for number in found]


class Case(typing.NamedTuple):
    """A number on a command line."""

    line: list[str]  # of which the last word ends in "=", the number's place
    names: tuple[str, ...]  # by which an error may call it
    whole: bool
    value: str

    def refused(self, fz, value):
        *line, last = self.line
        return refused(fz, [*line, f"{last}{value}"], self.names, value)


def of_flags():
    for words, command, option in flags():
        flag = option.opts[0]
        line = [*line_without(option, words, command), f"{flag}="]
        for value in VALUES:
            yield Case(line, (flag, SHORTHANDS.get(option.name, flag)), option.type.name == "integer", value)


def of_entries():
    for number, (name, value) in enumerate(itertools.product(ENTRIES, VALUES)):
        settings = [word for setting in SIZES.get(name, ()) for word in ("--set", setting)]
        words = CONFIGURED[number // STRIDE % len(CONFIGURED)]
        line = [*words, *AND.get(words[-1], ()), *settings, "--set", f"{name}="]
        yield Case(line, (name, name.removeprefix("model.")), isinstance(BOUNDS[name][0], int), value)


STRIDES = [pytest.param(STRIDE, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive)]


@pytest.fixture
def no_trace(monkeypatch, tmp_path):
    """A working folder without files, in which no plan is traced: its closed forms have seen the numbers."""
    from fzero.planner import plan

    def stop(*_, **__):
        raise ValueError("planned")

    monkeypatch.setattr(plan, "plan", stop)
    monkeypatch.chdir(tmp_path)


def test_each_number_has_bounds():
    for words, _, option in flags():
        assert isinstance(option.type, Number) or SHORTHANDS[option.name] in BOUNDS, (words, option.opts)
    assert len(flags()) > 80 and len(ENTRIES) > 110
    assert set(ENTRIES) <= set(BOUNDS), set(ENTRIES) - set(BOUNDS)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("cases", [of_flags, of_entries])
def test_a_number_is_taken_or_refused_by_a_bound_that_it_violates(cases, stride, fz, no_trace):
    for case in itertools.islice(cases(), None, None, stride):
        bound = case.refused(fz, case.value)
        for edge in edges(bound, case.whole) if bound else ():
            again = case.refused(fz, edge)
            assert again is None, (case, edge, again[0])


IDLE = [(words, command, option) for words, command in commands() for option in command.params
        if isinstance(option, Flag)]  # fmt: skip
ELSEWHERE = ("config", "finetune")  # a file for another machine; and there must be a model before there is a config


@pytest.mark.parametrize("case", range(len(IDLE)), ids=[f"{words[-1]} {option.opts[0]}" for words, _, option in IDLE])
def test_a_flag_is_refused_without_what_it_needs(case, fz, no_trace):
    words, command, option = IDLE[case]
    value = {"codec": "params=int8", "reduce": "once"}.get(option.name, "10")
    line = [*line_without(option, words, command), f"{option.opts[0]}={value}"]
    code, out, err = fz(*[word.replace("missing", "missing.txt") for word in line])
    if option.of is None or words[-1] not in ELSEWHERE:
        said = f"fzero: error: {option.opts[0]} is for {option.needs}; add that, or leave it out\n"
        assert (code, out, err) == (2, "", said)
    if option.of is None:
        _, _, err = fz(*line, option.needs if option.needs == "--search" else f"{option.needs}=1")
        assert f"{option.opts[0]} is for" not in err


def test_the_flags_that_need_something():
    assert {option.opts[0] for *_, option in IDLE} >= {
        "--top", "--imbalance", "--price-per-gpu-hour", "--nvme-gbs", "--between", "--text-key",
        "--codec", "--reduce",
    }  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        ("--nvme-gbs", "2", "--offload", "opt=nvme"),
        ("--between", "10:5", "--mesh", "dp=4", "--nproc-per-node", "2"),
        ("--model", "mixtral-tiny", "--mesh", "ep=2", "--imbalance", "1.2"),
        ("--codec", "params=int8", "--mesh", "dp=2", "--zero", "3"),
        ("--reduce", "once", "--mesh", "dp=2"),
        ("--reduce", "canonical"),
    ],
)
def test_a_flag_is_taken_with_what_it_needs(line, fz, no_trace):
    code, _, err = fz("plan", "--model", "mlp-tiny", *line)
    assert code == 2 and err.endswith("error: planned\n"), err

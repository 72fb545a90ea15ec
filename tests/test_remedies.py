"""Law: a remedy that an error names is one: the settings exist, and with them the call passes."""

import ast
import functools
import importlib
import itertools
import json
import re
from pathlib import Path

import click
import pytest
import torch
from remedies import remedies_of, tried

import fzero
from fzero import data, models, optim
from fzero.cli import main
from fzero.core import flat
from fzero.optim import sharded_leaves
from fzero.run import RunConfig, apply_table, to_table
from fzero.sharding import FAMILIES, Context, Pipeline, Spec, fake_mesh, local_shape, pipeline, schedule

ROOT = Path(fzero.__file__).parent


# -- every error: the names in it


def text_of(node):
    """The text of an expression, with {} for each value in it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "{}"


@functools.cache
def read_package():
    """([(where, expression of the text) of each error], the names of all arguments and fields, [(where, text) of each
    error and of each text that has a name or is returned]) of the package."""
    raised, names, texts = [], set(), []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            where, value = f"{path.relative_to(ROOT).as_posix()}:{getattr(node, 'lineno', 0)}", None
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                value = node.exc.args[0]
                raised.append((where, value))
            elif isinstance(node, ast.FunctionDef):
                names |= {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, ast.Assign | ast.Return) and isinstance(node.value, ast.JoinedStr | ast.Constant):
                value = node.value
            if value is not None:
                texts.append((where, text_of(value)))
    return raised, names, texts


@functools.cache
def keys():
    """The keys of a run's config, and of the tables in it."""
    every = [key for key, _ in flat(to_table(RunConfig()))]
    return {".".join(key.split(".")[:n]) for key in every for n in range(1, key.count(".") + 2)}


def flags(command):
    """The flags of a command and of those below it."""
    found = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    if isinstance(command, click.Group):
        context = click.Context(command)
        below = [command.get_command(context, name) for name in command.list_commands(context)]
        found |= set().union(*map(flags, below))
    return found


@functools.cache
def every_flag():
    return flags(main.cli)


# Names that are no settings: placeholders, an operation by its name, and a program's own flag.
OTHERS = {"a.b", "one", "two", "on", "float8_linear", "nproc-per-node", "use_cache"}  # on: of --lora


def unknown_in(text):
    """The settings, keys, public names and flags in a text that there are not."""
    for name in re.findall(r"(?<![\w{}.\-/])([a-z][\w.]*)=(?!=)", text):
        if name not in OTHERS and name not in (keys() if "." in name else read_package()[1]):
            yield name
    for dotted in re.findall(r"(?<![\w.\-/{}])((?:fzero|models|optim|checkpoint)(?:\.[A-Za-z_]\w*)+)", text):
        if dotted not in keys() and not is_public(dotted):
            yield dotted
    for flag in re.findall(r"(?<![\w\-])--([a-z][a-z\-]*)(?!\w)", text):
        if flag not in OTHERS and f"--{flag}" not in every_flag():
            yield f"--{flag}"


def is_public(dotted):
    first, *rest = dotted.split(".")
    here = fzero if first == "fzero" else getattr(fzero, first)
    for name in rest:
        if not hasattr(here, name):
            try:
                importlib.import_module(f"{here.__name__}.{name}")
            except (ImportError, AttributeError):
                return False
        here = getattr(here, name)
    return True


def test_an_error_names_what_there_is():
    """And has a text: one that is multiplied by a condition, as a whole, may have none."""
    for place, node in read_package()[0]:
        text = text_of(node)
        assert text.strip() and not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)), place
        unknown = [*unknown_in(text)]
        assert not unknown, f"{place}: {', '.join(unknown)} in {text!r}"


def test_names_that_are_not_there_are_seen():
    text = "use skip_nonfinite=False, fzero.Skipped(1), optim.no_key=1, optim.adam or --no-such-flag; micro_batches=2"
    assert [*unknown_in(text)] == ["skip_nonfinite", "optim.no_key", "fzero.Skipped", "optim.no_key", "--no-such-flag"]


COMMANDS = ("cli/", "run/", "planner/plan_text.py", "planner/launch.py")  # whose texts answer a command
# Options that a text has for another reason: what was given, a program's own, and a text that is in parentheses later.
OPTIONS = {"core/config_tables.py", "checkpoint/convert/upcycle.py", "kernels/aot.py", "offload/disk_io.py"}


def options_without_argument(text):
    """The options in a text that stand neither in parentheses, behind what a caller in Python writes, nor in a whole
    command (`fzero ...`, torchrun, python)."""
    for match in re.finditer(r"(?<![\w-])--[a-z][a-z-]*", text):
        before = text[: match.start()]
        inside = before.count("(") > before.count(")")
        if not inside and not re.search(r"(fzero [a-z]|torchrun |python )[^;]*$", before):
            yield match[0]


def test_an_error_for_python_names_what_python_writes():
    """Outside of the commands an option is in parentheses behind an argument: text_key= (--text-key). Also in texts
    that errors take from a constant of their module."""
    faults = []
    for place, text in read_package()[2]:
        if not place.startswith(COMMANDS) and place.partition(":")[0] not in OPTIONS and "\n" not in text:
            faults += [f"{place}: {option} in {text!r}" for option in options_without_argument(text)]
    assert not faults, "\n".join(faults)


def test_an_option_alone_is_seen():
    assert [*options_without_argument("use --seq-len 4 or --too-long drop")] == ["--seq-len", "--too-long"]
    assert not [
        *options_without_argument("use seq_len (--seq-len); run fzero plan --ask longest, or `torchrun --nnodes`")
    ]


# -- the calls


def test_an_argument_that_an_error_names_beside_its_option(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": f"text {i} " * 9}) + "\n" for i in range(40)))
    (tmp_path / "a.txt").write_text("some words of text " * 200)
    data.prepare(tmp_path / "a.txt", tmp_path / "bpe", tokenizer="bpe:260", eos="<end>")
    for i, (sources, options, text, fix) in enumerate((
        ("a.jsonl", {}, "with text_key= (--text-key)", {"text_key": "body"}),
        ("a.txt", {"eos": "x"}, "leave eos= out (--eos)", {"eos": None}),
        ("a.txt", {"tokenizer": tmp_path / "bpe/tokenizer.json"}, "by eos= (--eos)", {"eos": "<end>"}),
    )):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(text)):
            data.prepare(tmp_path / sources, tmp_path / f"{i}", **options)
        data.prepare(tmp_path / sources, tmp_path / f"{i}", **{**options, **fix})


def test_remedies_are_read():
    read = functools.partial(remedies_of, names=["a", "cp", "schedule"])
    assert read("x is 1; use a=2, or schedule gpipe or zb-v") == [{"a": 2}, {"schedule": "gpipe"}, {"schedule": "zb-v"}]
    assert read("x; use cp in {1, 2}, or nothing of it") == [{"cp": 1}, {"cp": 2}]
    assert read("x; use 14 or 28", subject="a") == [{"a": 14}, {"a": 28}]
    assert read('x; give a="b=c" and cp=2, or the step a=fzero.Skip(nonfinite=False)') == [
        {"a": "b=c", "cp": 2}, {"a": fzero.Skip(nonfinite=False)}]  # fmt: skip
    with pytest.raises(AssertionError, match="which is refused: a is 2"):
        tried(lambda a=1: (_ for _ in ()).throw(ValueError(f"a is {a}; use a=2")).__next__())


MODEL = models.llama(
    models.LlamaConfig(vocab_size=64, max_len=16, d_model=64, n_layers=4, n_heads=4, n_kv_heads=2, d_ff=192)
)


@pytest.mark.parametrize("make", (optim.adamw, optim.adam, optim.lion))
@pytest.mark.parametrize("tp", (2, 4, 8))
def test_blocks_of_8_bits_under_tp(make, tp):
    """Of all leaves together, and where no block fits none is named."""
    shapes = {"blocks": {"w_a": torch.zeros(1, 64, 512 * tp), "w_b": torch.zeros(1, 64, 96 * tp)}}
    if tp == 8:
        shapes["blocks"]["w_c"] = torch.zeros(1, 512, 8 * tp)
    shards = sharded_leaves.sharded(
        {"blocks": {name: Spec.parse("[L, D, F/tp]") for name in shapes["blocks"]}}, fake_mesh({"tp": tp}), like=shapes
    )
    local = {"blocks": {name: leaf[..., : leaf.shape[-1] // tp] for name, leaf in shapes["blocks"].items()}}

    def init(state_bits=8, block=256):
        sharded_leaves.bind(make(1e-3, state_bits=state_bits, block=block), shards).init(local)

    found = tried(init)
    assert found == ([{"state_bits": None}] if tp == 8 else [{"block": 32}, {"state_bits": None}])


SKIP = fzero.Skip()


@pytest.mark.parametrize(
    "options",
    (
        {"update": "backward", "offload": "opt=nvme"},
        {"update": "backward", "offload": "params=nvme,opt=nvme", "slots": 1},
        {"update": "backward", "offload": "opt=nvme", "slots": 1},
        {"update": "backward", "offload": "opt=host"},
        {"update": "backward", "offload": "opt=host", "clip": 1},
        {"update": "speculate", "offload": "acts=host", "remat": "full"},
        {"update": "speculate", "offload": "grads=host"},
        {"update": "speculate", "offload": "opt=nvme", "slots": 1},
        {"offload": "acts=host"},
        {"offload": "opt=host", "donate": False},
        {"offload": "params=host", "update": "speculate", "resident": 1},
        {"resident": 1},
        {"update": "delayed", "policy": "fp16", "updates": 1},
    ),
    ids=str,
)
def test_options_of_a_step(tmp_path, options):
    def make(update="end", offload="", slots=2, clip=0, remat="none", donate=True, resident=0, stage=0, policy="fp32",
             updates=0, skip=SKIP):  # fmt: skip
        nvme = fzero.Nvme(tmp_path, buffer_bytes=1 << 20, slots=slots) if "nvme" in offload else None
        plan = fzero.zero_plan(stage, MODEL, fzero.one_process(), offload=offload, policy=policy)
        plan = plan.with_updates(updates) if updates else plan
        tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw()) if clip else optim.adamw()
        how = fzero.Execution(remat=remat, resident=resident, update=update)
        fzero.make_train_step(MODEL, tx, plan, execution=how, donate=donate, skip=skip, nvme=nvme)

    tried(make, subject="policy" if "policy" in options else "", **options)


def plan_over(stage=0, dp=1, rp=1, tp=1, cp=1, ep=1, form="auto", reduce="fast", codec="", kind=None):
    model = MODEL if kind is None else models.build(models.preset(kind))
    mesh = fake_mesh({"dp": dp, "rp": rp, "tp": tp, "cp": cp, "ep": ep})
    return fzero.zero_plan(stage, model, mesh, sequence=Context.parse(form), reduce=reduce, codec=codec or None)


@pytest.mark.parametrize(
    ("options", "subject"),
    (
        ({"cp": 8, "form": "ulysses"}, ""),
        ({"cp": 2, "tp": 4, "form": "ulysses"}, ""),
        ({"cp": 4, "form": "hierarchical/3"}, "form"),
        ({"cp": 9, "form": "hierarchical/3"}, "form"),
        ({"reduce": "canonical", "dp": 6}, ""),
        ({"stage": 3, "dp": 2, "codec": "grads=int4", "reduce": "canonical"}, ""),
        ({"ep": 16, "kind": "mixtral-tiny"}, ""),
        ({"stage": 3, "dp": 2, "codec": "reset=4,grads=int4"}, "codec"),
        ({"stage": 3, "dp": 2, "codec": "loco"}, "codec"),
        ({"stage": 3, "dp": 2, "codec": "grads=int4,errors=int8"}, "codec"),
        ({"stage": 3, "dp": 2, "rp": 2, "codec": "errors=int8,hpz"}, "codec"),
        ({"stage": 0, "dp": 2, "codec": "grads=1bit,block=64,local"}, "codec"),
        ({"stage": 0, "dp": 2, "codec": "grads=1bit,loco"}, "codec"),
        ({"stage": 3, "dp": 2, "codec": "block=64"}, "codec"),
        ({"stage": 2, "dp": 2, "codec": "grads=1bit"}, ""),
    ),
    ids=str,
)
def test_plans(options, subject):
    tried(plan_over, subject=subject, **options)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [*itertools.product(("gpipe", "1f1b", "zb-v", "interleaved"), (1, 2, 3))]
)
def test_schedules_and_their_chunks(schedule, chunks):
    try:
        Pipeline(schedule=schedule, chunks=chunks)
    except ValueError:
        tried(lambda schedule, chunks: Pipeline(schedule=schedule, chunks=chunks), schedule=schedule, chunks=chunks)


def test_chunks_follow_the_schedule():
    """Of a Pipeline, and where a run's config gets another schedule; what is asked for is kept or refused."""
    assert {name: Pipeline(name).chunks for name in FAMILIES} == {n: f.chunks or 1 for n, f in FAMILIES.items()}
    config = RunConfig()
    for name, given, chunks in (
        ("zb-v", {}, 2),
        ("interleaved", {}, 2),
        ("interleaved", {"chunks": 3}, 3),
        ("1f1b", {}, 1),
    ):
        config = apply_table(config, {"pipeline": {"schedule": name, **given}})
        assert (config.pipeline.schedule, config.pipeline.chunks) == (name, chunks)
    with pytest.raises(ValueError, match="use chunks=2"):
        apply_table(config, {"pipeline": {"schedule": "zb-v", "chunks": 1}})


def test_micro_batches_of_every_schedule():
    refused = 0
    for name, p, v, m in itertools.product(FAMILIES, (2, 3, 4, 5), (1, 2), range(1, 14)):
        if FAMILIES[name].chunks in (None, v):
            stages = pipeline.layout([1.0] * (p * v), p, v, FAMILIES[name].placement)
            try:
                schedule(name, stages, m)
            except ValueError:
                refused += 1
                tried(lambda m, n=name, s=stages: schedule(n, s, m), subject="m", m=m)
    assert refused > 20


@pytest.mark.parametrize("tokens", (5, 12, 30, 33))
@pytest.mark.parametrize("over_tp", (False, True))
def test_tokens_of_a_sequence(tokens, over_tp):
    def expect(tokens):
        Context("gather", "zigzag").pieces_for(4).expect_divisible(tokens, 3 if over_tp else 1)

    try:
        expect(tokens)
    except ValueError:
        tried(expect, subject="tokens", tokens=tokens)


def test_masks():
    tried(lambda mask: optim.adamw(mask=mask).init({"w": torch.ones(2)}), mask="^bias$")


def test_sizes_of_a_dim():
    shape = lambda size: local_shape((size, 3), Spec.parse("[D/dp, F]"), fake_mesh({"dp": 4}), leaf="w")  # noqa: E731
    with pytest.raises(ValueError, match="pad it to 8, or leave it whole"):
        shape(7)
    assert shape(8) == (2, 3)

"""What compilers made is kept for later processes: the same numbers, and none for another question."""

import functools
import json
import os
from collections.abc import Mapping
from types import MappingProxyType

import pytest
import torch
from close import assert_same

from fzero import jit, models
from fzero.core import compile as fzero_compile
from fzero.core import compile_cache, form_observer, program_cache, pytree, segment_pair, vjp_pair
from fzero.models import Ctx
from fzero.sharding import ActivationSplit, fake_mesh


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_cache, "_ALLOWED", [True])
    return tmp_path


# ---- answers ----


def changed(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


DAMAGED = {
    "cut": lambda path, library: path.write_text(path.read_text()[:-20]),
    "another answer": lambda path, library: changed(path, answer={"x": 2}),
    "another question": lambda path, library: changed(path, question="which"),
    "no form": lambda path, library: path.write_text("[]"),
    "another library": lambda path, library: library.write_bytes(b"other"),
    "no library": lambda path, library: library.unlink(),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_an_answer_is_found_unless_a_byte_of_it_is_another(folder, how):
    library = folder / "library.so"
    library.write_bytes(b"code")
    assert compile_cache.load_answer("what") is None
    compile_cache.store("what", {"x": 1}, [str(library)])
    assert compile_cache.load_answer("what") == {"x": 1} and compile_cache.load_answer("which") is None
    (path,) = compile_cache.folder().glob("*.json")
    DAMAGED[how](path, library)
    assert compile_cache.load_answer("what") is None


def test_where_nothing_can_be_written_nothing_is_kept(folder):
    compile_cache.folder().write_text("a file in its place")
    compile_cache.store("what", {"x": 1})
    assert compile_cache.load_answer("what") is None


# ---- questions ----


def outside(x):
    return x


LLAMA = {"vocab_size": 32, "d_model": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "d_ff": 32, "max_len": 8}
DIFFERENT = [
    *(1, 1.0, True, "1", None, (1,), [1], {"a": 1}, {"a": 2}, torch.float32, torch.bfloat16, int, float),
    *(models.llama(models.LlamaConfig(**LLAMA, norm_eps=eps)).block for eps in (1e-5, 1e-6)),
    models.gpt2(models.GPT2Config(d_model=16, n_layers=1, n_heads=2, d_ff=32)).block,
    *(functools.partial(jit, n) for n in (1, 2)),
    *(
        Ctx(dtype=dtype, split=ActivationSplit(sequence=flag))
        for dtype in (torch.float32, torch.bfloat16)
        for flag in (False, True)
    ),
    *(fake_mesh({"dp": 2}, rank=rank) for rank in (0, 1)),
]


def test_what_is_traced_otherwise_is_described_otherwise():
    texts = [json.dumps(program_cache.describe(value)) for value in DIFFERENT]
    assert len(set(texts)) == len(DIFFERENT)
    again = models.llama(models.LlamaConfig(**LLAMA, norm_eps=1e-5)).block
    assert json.dumps(program_cache.describe(again)) == texts[13]


VALUES = ["function", "lambda", "tensor", "object", "class", "function in a list"]


@pytest.mark.parametrize("value", [outside, lambda x: x, torch.ones(1), object(), Mapping, [outside]], ids=VALUES)
def test_what_values_do_not_tell_apart_has_no_description(value):
    if value is Mapping:
        value = MappingProxyType({"f": functools.partial(outside, 1)})
    with pytest.raises(ValueError, match="not told apart"):
        program_cache.describe(value)


def other_value(name):
    """A change of an environment variable to what it has on no machine."""
    return lambda patch: patch.setenv(name, f"{os.environ.get(name, '')} of another")


CHANGES = {
    "threads": lambda patch: patch.setattr(torch, "get_num_threads", lambda: 64),
    "package": lambda patch: patch.setattr(compile_cache, "package_digest", lambda: "another"),
    "processor": lambda patch: patch.setattr(compile_cache, "processor", lambda: "another"),
    **{
        name: other_value(name)
        for name in ("TORCHINDUCTOR_MAX_AUTOTUNE", "ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
    },
    "torch": lambda patch: patch.setattr(compile_cache.metadata, "version", lambda name: "2.0"),
}


def test_every_change_of_surroundings_and_inputs_is_another_question(folder, monkeypatch):
    x = torch.ones(4, 6)
    asked = {program_cache.program_question(1, given) for given in ([x], [x.T], [x[:2]], [x.double()], [x, x])}
    asked.add(program_cache.program_question(2, [x]))
    for change in CHANGES.values():
        with monkeypatch.context() as patch:
            change(patch)
            asked.add(program_cache.program_question(1, [x]))
    assert None not in asked and len(asked) == 6 + len(CHANGES)
    assert program_cache.program_question(1, [x.to("meta")]) is None
    assert program_cache.program_question(outside, [x]) is None
    monkeypatch.setattr(compile_cache, "_ALLOWED", [])
    assert program_cache.program_question(1, [x]) is None


# ---- programs ----


def block_pair():
    """The pair of a Llama's block, made anew as in another process, and its inputs."""
    model = models.llama(models.LlamaConfig(**LLAMA))
    layer = model.init(lambda name, shape, std, mean=0.0: torch.full(shape[1:], 0.1 + mean))["blocks"]
    leaves, layer_def = pytree.flatten(layer)
    _, x_def = pytree.flatten(0)
    ctx_leaves, ctx_def = pytree.flatten(Ctx())
    static = tuple((type(leaf), leaf) for leaf in ctx_leaves)
    segment_pair.cache_clear()
    pair, _ = segment_pair("block", model.block, (layer_def, x_def, ctx_def, static), True)
    return pair, [*leaves, torch.arange(2 * 8 * 16).reshape(2, 8, 16) / 200.0, torch.zeros((), dtype=torch.int64)]


def both_passes(pair, inputs):
    out, residuals = pair.forward(inputs)
    return [*out, *pair.backward(residuals, [torch.cos(out[0])])]


@pytest.mark.slow
def test_a_kept_program_has_the_same_bits_and_is_not_traced(folder, monkeypatch):
    told = []
    with fzero_compile.on_first_compile(lambda: told.append(1)), form_observer.observe() as first:
        made = both_passes(*block_pair())
    assert told == [1] and "swiglu" in first
    assert len(list(folder.rglob("*.main.so"))) == 2 < len(program_cache._LOADED)  # one library for each graph
    with monkeypatch.context() as patch, form_observer.observe() as later:
        patch.setattr(vjp_pair, "_split_programs", lambda *given: pytest.fail("traced"))
        with fzero_compile.on_first_compile(lambda: pytest.fail("compiled")):
            assert_same(both_passes(*block_pair()), made)
    assert later == first
    for library in folder.rglob("*.so"):
        library.unlink()
    assert program_cache.load_programs(_questions(folder)[0]) is None


def _questions(folder):
    tables = [json.loads(path.read_text()) for path in folder.rglob("fzero/*.json")]
    return [table["question"] for table in tables if "programs" in table["answer"]]


def test_a_program_that_is_not_understood_is_not_kept_but_known(folder):
    """One with a name that this process could not give it later."""
    assert program_cache.program_of(lambda args: args) is None
    program_cache.store_programs("asked", [lambda args: args], {"outputs": 1, "forms": {}})
    found = program_cache.load_programs("asked")
    assert found is not None and found.programs is None
    text = "class Runner:\n  def call(self, args): return torch.ops.fzero.nothing(args)"
    assert program_cache.load(program_cache.StoredProgram(text, {}, [], [])) is None

"""Very long sequences on one device: what grows with T, what is in float32, and the question for the longest one."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from close import assert_same

from fzero import local_batch
from fzero.kernels import FULL, attention_tiled, linear_cross_entropy, norm
from fzero.planner import device_for, max_sequence, plan, resolve_for
from fzero.run import MemoryTrace, build
from fzero.run.measure.live_bytes import recorded
from fzero.sharding import one_process

CHUNK = 128  # tokens of a chunk of the MLP, the norms and the loss


class Born(NamedTuple):
    """A storage of a traced step."""

    op: str
    place: str
    dtype: torch.dtype
    bytes: int


@pytest.fixture
def small_chunks(monkeypatch):
    """All that works on some tokens at a time takes so few that short sequences have many chunks."""
    monkeypatch.setattr(attention_tiled, "has_small_products", lambda dtype: True)  # as on a CPU with AMX
    monkeypatch.setattr(norm, "LONG", 1)
    monkeypatch.setattr(norm, "CHUNK", CHUNK * 256)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", dict.fromkeys(("cpu", "cuda"), CHUNK * 256 * 2))


def births(monkeypatch, model, tokens, policy, compiled, gpu):
    """The storages that the passes of a step make, in order."""
    found = []
    born = MemoryTrace.born

    def noted(self, x, key, size, here):
        if self.current_visit.phase in ("forward", "backward"):
            place = f"{self.current_visit.phase}/{self.current_visit.segment}"
            found.append(Born(self.op, place, x.dtype, size))
        return born(self, x, key, size, here)

    settings = {"precision.policy": policy, "train.compiled": compiled, "model.mlp_tokens": CHUNK}
    device = device_for(gpu)
    config = max_sequence.set_length(plan.config_for(model, settings), tokens, "", device.kind)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryTrace, "born", noted)
        max_sequence.trace_passes(resolve_for(config, device), device.target)
    return found


def largest(found):
    """{(operator, part of the model): bytes of its largest storage}."""
    out = {}
    for one in found:
        out[one.op, one.place] = max(out.get((one.op, one.place), 0), one.bytes)
    return out


# Storages of a bfloat16 step in float32 that are as long as the sequence, with the reason why they remain.
WIDE = {"fzero.tiled_backward": "dk and dv of one head for each thread: sums over blocks of queries and over heads"}


@pytest.mark.parametrize(
    "model",
    (pytest.param("gpt2-tiny", marks=pytest.mark.slow), pytest.param("llama-tiny", marks=pytest.mark.exhaustive)),
)
def test_nothing_grows_faster_than_the_sequence(model, small_chunks, monkeypatch):
    """Eager, on a CPU: twice the tokens take at most twice the bytes of any storage, and no float32 copy of the
    sequence is made but those of WIDE."""
    once, twice = (births(monkeypatch, model, tokens, "bf16", False, "here") for tokens in (1024, 2048))
    before = largest(once)
    slack = 64  # bytes: differences of neighbours have one element less than the sequence
    assert not {key: size for key, size in largest(twice).items() if size > 2 * before[key] + slack}
    sizes = largest(once)
    grown = [one for one in twice if one.bytes >= 2048 * 64 * 4 and one.bytes > sizes[one.op, one.place]]
    assert {one.op for one in grown if one.dtype == torch.float32} == set(WIDE)


def test_blocks_of_queries_have_a_number_of_scores_that_does_not_grow_with_its_square():
    for t in (1, 100, 1000, 8192, 8193, 30_000, 65_536, 300_000):
        rows = [block.queries for block in attention_tiled._blocks(t, t, FULL)]
        assert max(r.stop - r.start for r in rows) * t <= max(attention_tiled.MAX_SCORES, 128 * t)
        assert [r.start for r in rows] == [0, *(r.stop for r in rows[:-1])] and rows[-1].stop == t
    assert len(attention_tiled._blocks(8192, 8192, FULL)) == 8


class Line(NamedTuple):
    """What `find` needs of the passes."""

    tokens: int
    peak_bytes: int
    host_bytes: int


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_layers_have_few_chunks_however_long_the_sequence(kind):
    """What is traced of a layer grows with the square of their number."""
    config = plan.config_for("llama-tiny", {})
    for tokens in (1024, max_sequence.START[kind], 64 * max_sequence.LAYER_TOKENS[kind] + 128, 37_676_800):
        chunk = max_sequence.set_length(config, tokens, "", kind).model.layer_tokens
        assert chunk >= max_sequence.LAYER_TOKENS[kind] and tokens <= 64 * max(chunk, 1024)
        assert chunk == max_sequence.LAYER_TOKENS[kind] or (chunk % max_sequence.UNIT == 0 and chunk * 60 < tokens)


@pytest.mark.parametrize("capacity, host", ((10_000_000, None), (10_000_000, 5_000_000), (200_000, None), (3000, None)))
def test_the_longest_of_functions_of_three_lines(capacity, host):
    """Found by few measurements, wherever the lines meet; nothing longer by a ROOM fits."""
    count = 0

    def measure(tokens):
        nonlocal count
        count += 1
        return Line(tokens, max(1000 + 7 * tokens, 500 + 9 * tokens, 11 * tokens - 40_000), 10 * tokens)

    found, _ = max_sequence.find(measure, capacity, host, {t: measure(t) for t in (128, 16384, 32768)})
    longer = measure(max(found.tokens + max_sequence.UNIT, int(found.tokens * (1 + 2 * max_sequence.ROOM))))
    assert found.peak_bytes <= capacity and found.host_bytes <= (host or found.host_bytes)
    assert longer.peak_bytes > capacity or (host and longer.host_bytes > host)
    assert count < 15


def test_the_longest_where_a_long_sequence_takes_less():
    """As where a kernel with smaller temporaries serves from some length on: the answer is the edge of a bracket."""
    count = 0

    def measure(tokens):
        nonlocal count
        count += 1
        return Line(tokens, (14 if tokens < 16384 else 11) * tokens, 0)

    found, _ = max_sequence.find(measure, 150_000, None, {t: measure(t) for t in (128, 16384, 32768)})
    assert found.peak_bytes <= 150_000 < measure(found.tokens + max_sequence.UNIT).peak_bytes and count < 20


def test_what_does_not_grow_is_above_the_line():
    """A line through two long sequences promises a short one that what is there at any length does not allow."""

    def measure(tokens):
        return Line(tokens, max(90_000, 60_000 + 3 * tokens), 0)

    def asked(capacity):
        seen = {t: measure(t) for t in (20_000, 40_000)}
        return max_sequence.interpolate("", seen, capacity, None, measure)

    assert asked(89_000).tokens == 0
    fits = asked(100_000)
    assert 0 < fits.tokens < 20_000 and measure(fits.tokens).peak_bytes <= 100_000


@pytest.mark.exhaustive
def test_nothing_fits(fz):
    code, _, err = fz("plan", "--ask", "longest", "--model", "llama-8b", "--gpu", "4090", "--offload", "acts=host",
                      "--memory-gb", "3", "--remat", "full", "--set", "model.n_layers=1",
                      "--set", "train.compiled=false")  # fmt: skip
    assert code == 2 and "not even 128 tokens fit: with offload acts=host they need" in err


def test_the_question_refuses_what_it_does_not_answer(fz):
    for flags, words in (
        (["--vary", "remat=none,full"], "--ask longest answers one question; leave out --vary"),
        (["--mesh", "dp=2"], "the longest sequence is asked for one device, and the mesh is"),
    ):
        code, _, err = fz("plan", "--ask", "longest", "--model", "llama-tiny", *flags)
        assert code == 2 and words in err


def measured_peak(config):
    """The most bytes of live tensors in a real second step, by operators."""
    mesh = one_process()
    job = build.build(config, mesh)
    drawn = torch.randint(0, config.model.vocab_size, (1, config.data.seq_len + 1))
    batch = {"tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}
    batch |= {"documents": torch.zeros_like(batch["tokens"], dtype=torch.int32)}
    batch |= {"mask": torch.ones_like(batch["tokens"], dtype=torch.bool)}
    state, _ = job.train_step(build.first_state(job), {name: x[:, :64].contiguous() for name, x in batch.items()})
    record = MemoryTrace(state, batch)
    with recorded(record, mesh.ledger):
        job.train_step(state, batch)
    return record.peak


def long_run(folder, offload):
    """(the state of three steps of long rows of documents, losses), by chunks of everything that is made in chunks."""
    settings = {"precision.policy": "bf16", "train.compiled": False, "train.remat": "full", "model.mlp_tokens": CHUNK}
    settings |= {"model.n_layers": 3, "model.d_model": 64, "model.d_ff": 128, "model.n_heads": 4, "model.n_kv_heads": 2}
    settings |= {"data.seq_len": 1024, "model.max_len": 1024, "train.batch": 2, "train.micro_batch": 1}
    config = resolve_for(plan.config_for("llama-tiny", {**settings, "offload": offload}), device_for("here"))
    job = build.build(config, one_process(), folder)
    state, losses = build.first_state(job), []
    for step in range(3):
        g = torch.Generator().manual_seed(step)
        rows = torch.randint(0, config.model.vocab_size, (2, 1025), generator=g)
        batch = {"tokens": rows[..., :-1].contiguous(), "targets": rows[..., 1:].contiguous()}
        batch["documents"] = (torch.rand(2, 1024, generator=g) < 0.01).cumsum(-1).int()
        state, metrics = job.train_step(state, local_batch(batch, one_process(), 2))
        losses.append(float(metrics.loss))
    return state, losses


@pytest.mark.parametrize("where", ["nvme", pytest.param("host", marks=pytest.mark.exhaustive)])
def test_a_long_run_with_inputs_of_layers_elsewhere_has_the_bits_of_one_that_keeps_them(where, small_chunks, tmp_path):
    kept, losses = long_run(tmp_path / "kept", "")
    away, same = long_run(tmp_path / "away", f"acts={where}")
    assert same == losses and losses[0] != losses[-1]
    assert_same(away.params, kept.params)
    assert_same(away.opt_state, kept.opt_state)


@pytest.mark.exhaustive
def test_the_longest_trains_and_a_fiftieth_more_does_not():
    """llama-tiny on this CPU: real steps at the answer's length and 2% beyond, against the capacity."""
    device = device_for("here")
    room = int(150e6 / (1 - device.margin))
    device = dataclasses.replace(device, memory_bytes=device.reserved_bytes + room)
    config = plan.config_for("llama-tiny", {"precision.policy": "bf16", "train.compiled": False})
    best = max_sequence.longest(config, device).best
    for tokens, fits in ((best.tokens, True), (int(best.tokens * 1.02) // 2 * 2, False)):
        at = max_sequence.set_length(config, tokens, "", "cpu")
        assert (measured_peak(resolve_for(at, device)) <= device.capacity_bytes) == fits, (tokens, fits)

"""Odd values at the doors: each is one line that names the thing, and none takes the machine, hangs or is a fault."""

import contextlib
import json
import os
import pty
import resource
import select
import sys
import time

import pytest
import reported
import torch
import torch.distributed as dist

from fzero import checkpoint, data
from fzero.checkpoint.convert.huggingface_config import _read_rope
from fzero.cli import process
from fzero.core import COUNT, FRACTION, POSITIVE, RATE, SIZE, check_bounds
from fzero.data import Chat, read_chat, render
from fzero.data.prepare import open_work
from fzero.report import curves
from fzero.run import sized_bar


@pytest.mark.parametrize("count", [0, 256, 10**12, 2**63 - 1, 2**64, "9" * 5000, "²", "-1"])
def test_a_number_of_tokens_is_refused_before_anything_is_made(count, tmp_path):
    (tmp_path / "text.txt").write_text("some text " * 100)
    with pytest.raises(
        ValueError, match=r"wanted bpe:N with a number of tokens N of at least 257 and at most 10,000,000"
    ):
        data.prepare(tmp_path / "text.txt", tmp_path / "out", tokenizer=f"bpe:{count}")
    assert os.listdir(tmp_path) == ["text.txt"]


class PanicException(BaseException):
    """As that of a library in Rust."""


@pytest.mark.parametrize(("error", "stays"), [(PanicException, False), (ValueError, False), (KeyboardInterrupt, True)])
def test_what_a_panic_leaves_does_not_block_the_next_preparation(error, stays, tmp_path):
    with pytest.raises(error), open_work(tmp_path / "out", {"a": 1}):
        raise error
    assert os.path.exists(tmp_path / "out.partial") == stays


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_of_a_corpus_is_a_seed(seed, tmp_path):
    (tmp_path / "text.txt").write_text("some text " * 100)
    with pytest.raises(ValueError, match=r"seed is .*; it must be at least 0 and below 2\^64"):
        data.prepare(tmp_path / "text.txt", tmp_path / "out", seed=seed)


GROWS = "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = @ %}{% endfor %}{{ ns.x }}"
TEMPLATES = {
    "a product": "{{ 'a' * 10**10 }}",
    "a width": "{{ 'a'.ljust(10**10) }}",
    "a filter's width": "{{ 'a' | center(10**10) }}",
    "an indent": "{{ messages | tojson(indent=10**9) }}",
    "a format": "{{ '{:>10000000000}'.format(1) }}",
    "an old format": "{{ '%10000000000d' | format(1) }}",
    "a format's star": "{{ '%*d' % (10**10, 1) }}",
    "loops": "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "doubled by ~": GROWS.replace("@", "ns.x ~ ns.x"),
    "doubled by +": GROWS.replace("@", "ns.x + ns.x"),
    "doubled by join": GROWS.replace("@", "[ns.x, ns.x] | join"),
    "doubled by replace": GROWS.replace("@", "ns.x | replace('a', 'aa')"),
    "doubled by a block": GROWS.replace("{% set ns.x = @ %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "ifs": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "filters": "{{ x" + " | list" * 5000 + " }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_takes_no_machine(name):
    begin, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        ValueError, match=r"^the chat template (refuses the conversation: .* more than|is nested too deep)"
    ):
        render(Chat(TEMPLATES[name]), [{"role": "user", "content": "hi"}])
    assert time.thread_time() - begin < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700_000


def test_a_template_may_say_long_texts():
    text = "a word and " * 200_000
    template = "{% for m in messages %}{{ m.role | upper ~ ': ' + m.content.replace('word', 'W') | trim }}{% endfor %}"
    assert len(render(Chat(template), [{"role": "user", "content": text}] * 3)) == 3 * (len(text) - 3 * 200_000 + 5)


@pytest.mark.parametrize("value", [[None], [1], ["x"], [[]], {"a": 1}, 7, [{"name": "default"}]])
def test_a_chat_template_of_another_kind_is_refused_by_name(value, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: .*(chat_template|template)"):
        read_chat(tmp_path)


@pytest.mark.parametrize("bounds", [POSITIVE, COUNT, RATE, SIZE, FRACTION, (0, True, 2**64)])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), -1])
def test_the_bounds_that_an_error_names_exclude_the_value(bounds, value):
    with pytest.raises(ValueError, match=f"x is {value}; it must be") as error:
        check_bounds("x", value, bounds)
    said = str(error.value)
    assert value == -1 or "below" in said or "finite" in said, said


@pytest.mark.parametrize("mesh", ["dp=1,dp=2", "dp=2, dp=2", "dp=10000000,tp=10000000", f"dp={10**30}", "dp=²"])
@pytest.mark.parametrize("command", ["plan", "pretrain"])
def test_a_mesh_in_words_is_refused_at_once(mesh, command, fz, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begin = time.thread_time()
    code, _, err = fz(command, "--mesh", mesh)
    assert code == 2 and err.count("\n") == 1 and mesh[:10] in err and "--mesh" in err, err
    assert time.thread_time() - begin < 5 and not os.listdir(tmp_path)


@pytest.mark.parametrize("value", ["inf", "nan", "0", "-1"])
def test_a_peak_is_a_finite_number(value, fz, tmp_path):
    code, _, err = fz("pretrain", "--peak-tflops", value, "--out", tmp_path / "run")
    assert code == 2 and f"--peak-tflops is {float(value)}; it must be above 0" in err


@pytest.mark.parametrize("words", [(), ("data",), ("ckpt",)])
def test_a_group_without_a_command_shows_its_help(words, fz):
    code, out, err = fz(*words)
    assert code == 2 and out == "" and "fzero: error" not in err
    assert err.startswith("Usage: fzero") and err.count("\n") > 9


@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling", ""])
def test_a_base_of_rope_that_is_null_is_refused(where, tmp_path):
    hf = {where: {"rope_theta": None}} if where else {"rope_theta": None}
    with pytest.raises(ValueError, match=r"rope_theta is (None|null)"):
        _read_rope(hf, 1e4, tmp_path / "config.json")


def test_files_that_are_left_out_are_named(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "good.txt").write_text("some text " * 100)
    for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
        (folder / name).write_bytes(b"\0\1")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    meta = data.prepare(folder, tmp_path / "out")
    last = data.describe(meta).splitlines()[-1]
    for name in ("a.txt", "b.txt", "c.txt", "latin.txt"):
        assert name in last, last
    assert last.startswith("left out: 4 binary (") and ", ...), 1 not UTF-8 (" in last


def test_a_writer_that_is_closed_says_so(tmp_path):
    writer = checkpoint.Writer(tmp_path)
    writer.save({"w": torch.ones(2)}, step=1)
    writer.close()
    with pytest.raises(ValueError, match="this writer is closed; make a new one to save step 2"):
        writer.save({"w": torch.ones(2)}, step=2)
    writer.close()
    assert checkpoint.steps(tmp_path) == [1]


@pytest.mark.parametrize("kind", ["DistNetworkError", "DistStoreError"])
def test_a_launcher_that_ended_is_no_fault(kind, capsys):
    error = getattr(dist, kind)("recvValue failed on SocketImpl: Connection reset by peer\nframe #0: ...")
    assert process.end_failed(error) == process.MISTAKE
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1
        and "torchrun, or the rank that keeps its store, has ended" in said
        and "fault" not in said
    )


@pytest.mark.parametrize(
    "row", [{"step": 1}, {"step": 1, "tokens": "x", "loss": 1.0}, {"step": 1, "loss": 1.0, "tokens": 3}]
)
def test_a_row_without_keys_is_named_where_it_is_drawn(row, tmp_path, pictures):
    reported.make_run(tmp_path / "run", steps=4)
    (tmp_path / "run/metrics.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl(: damaged, or not of the form|:1: is not a row of metrics)"):
        pictures(tmp_path / "run")


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device", "loss.png"), ValueError("metrics.jsonl: damaged")]
)
def test_a_picture_that_cannot_be_drawn_does_not_end_a_run(error, tmp_path, monkeypatch):
    from fzero.cli import pretrain
    from fzero.run import coordinator

    def fail(folder):
        raise error

    monkeypatch.setattr(curves, "write_pictures", fail)
    said = []
    assert pretrain.finish(coordinator.Coordinator(), tmp_path, 0, said.append) == 0
    assert len(said) == 1 and said[0].startswith("pictures: none (") and str(error) in said[0]


def test_a_terminal_of_no_columns_shows_the_bar(monkeypatch):
    leader, follower = pty.openpty()  # of 0 columns
    with open(follower, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with sized_bar(total=5, unit="step", mininterval=0) as bar:
            bar.set_postfix_str("loss 1.5")
            bar.update(3)
        stream.flush()
        shown, end, ready = "", time.monotonic() + 10, select.poll()  # select() takes no file above 1023
        ready.register(leader, select.POLLIN)
        while not ("3/5" in shown and "loss 1.5" in shown) and time.monotonic() < end:  # it comes in pieces
            if ready.poll(100):
                shown += os.read(leader, 1 << 16).decode()
    with contextlib.suppress(OSError):
        os.close(leader)
    assert "3/5" in shown and "loss 1.5" in shown, shown

"""Every file of a run: what fzero writes its own readers read, whatever the names and texts in it; and a file that is
damaged, missing, a link, a FIFO or a folder is one line or no matter: no hang, no traceback, no other file changed."""

import gzip
import json
import os
import random
import socket
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import damaged_runs
import numpy as np
import pytest

from fzero import checkpoint, data, open_loggers
from fzero.core import append_line, json_text, parse_json, read_json, remove_entry, set_nested
from fzero.data import Chat, read_chat
from fzero.data.tokenizers import train_bpe
from fzero.report import curves
from fzero.run import from_table, rollback, run_folder, run_lock, weights

WORDS = "--model mlp-tiny --steps 8 --batch 4 --micro-batch 2 --seq-len 16 --precision fp32 --peak-tflops 1 --lr 0.01"
SETTINGS = damaged_runs.SETTINGS
ODD = "é ∑ \u2028 'x' \x1b[31m\ny"  # a name of a folder, a prompt


def begin(fz, folder, *more, name="run"):
    """A run of 4 of its 8 steps in `folder`."""
    (folder / "text.txt").write_text("\n".join(f"line {i}: {i * i}" for i in range(300)))
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    data = ("--data", folder / "text.txt", "--stop-at", 4, "--out", folder / name)
    code, _, err = fz("pretrain", *WORDS.split(), *settings, *data, *more)
    assert code == 0, err
    return folder / name


def sound(lines):
    """Nothing is damaged in what `fzero data verify` says."""
    assert not any("damaged" in line for line in lines), lines


READERS = {
    "config.json": lambda path: run_folder.read_config(path.parent),
    "environment.json": lambda path: run_folder.read_environment(path.parent),
    "metrics.jsonl": lambda path: list(run_folder.read_metrics(path.parent)),
    "attempts.jsonl": lambda path: run_folder.read_attempts(path.parent),
    "samples.jsonl": lambda path: list(run_folder.read_lines(path)),
    "metrics.csv": lambda path: open_loggers(["csv"], path.parent).__enter__(),
    "skips.json": lambda path: rollback.read_log(path.parent),
    "ledger.json": read_json,
    "memory.json": read_json,
    "plan.json": read_json,
    "trace.json.gz": lambda path: parse_json(gzip.decompress(path.read_bytes()), str(path)),
    "*.png": lambda path: path.read_bytes().index(b"\x89PNG"),
    "report/report.json": read_json,
    "report/*": lambda path: path.read_text(encoding="utf-8"),
    "data/meta.json": read_json,
    "data/*": lambda path: sound(data.verify(path.parent)),
    "checkpoints/step-*": lambda path: checkpoint.expect_sound(
        path.parents[len(path.parts) - path.parts.index("checkpoints") - 3]
    ),
}


@pytest.mark.slow
def test_what_a_run_writes_its_readers_read(tmp_path, fz, pictures, monkeypatch):
    monkeypatch.setattr(curves, "write_pictures", pictures)
    run = begin(fz, tmp_path, "--prompt", ODD, "--profile", "3-3", "--steps", 14, "--stop-at", 10, name=ODD)
    code, _, err = fz("pretrain", "--out", run, "--resume", "--prompt", ODD)
    assert code == 0, err
    code, _, err = fz("report", run)
    assert code == 0, err
    seen = set()
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        pattern = next((each for each in READERS if fnmatch(str(path.relative_to(run)), each)), None)
        assert pattern, f"{path}: no reader is known for this file of a run"
        READERS[pattern](path)
        seen.add(pattern)
    assert seen >= READERS.keys() - {"skips.json"}, READERS.keys() - seen
    assert [row["step"] for row in run_folder.read_metrics(run)] == list(range(1, 15))


@pytest.mark.parametrize("word", ["\udce9", "a\ud800b"])
def test_an_argument_that_is_not_text_is_refused(word, tmp_path, fz):
    for command in (("pretrain", "--prompt", word, "--out", tmp_path / "run"), ("report", word)):
        code, _, err = fz(*command)
        assert code == 2 and "is not UTF-8 text" in err and err.count("\n") == 1 and err.isascii()
    assert not (tmp_path / "run").exists()


def test_a_text_that_a_reader_refuses_is_not_written():
    for value in ({"a": ["\udce9"]}, {"a": ("\udce9",)}, {"a": 2**70}):
        with pytest.raises(ValueError, match=r"^x\.json: "):
            json_text(value, "x.json")


def test_a_folder_whose_name_is_not_text_is_refused_before_anything_is_made(tmp_path, fz, monkeypatch):
    folder = os.fsencode(tmp_path) + b"/d\xe9"
    os.mkdir(folder)
    monkeypatch.chdir(folder)
    Path("text.txt").write_text("some text " * 500)
    code, _, err = fz("pretrain", *WORDS.split(), "--data", "text.txt", "--out", "run", "--set", "device=cpu")
    assert code == 2 and "is no text" in err and os.listdir() == ["text.txt"], err


def test_a_line_after_one_that_a_kill_cut_short(tmp_path):
    path = tmp_path / "attempts.jsonl"
    for before in ('{"attempt": 1}\n{"att', '{"att', '{"attempt": 1}\n', "", '{"a": "' + "x" * 200_000):
        path.write_text(before)
        append_line(path, '{"attempt": 2}')
        lines = [line["attempt"] for line in run_folder.read_lines(path)]
        assert lines == ([1, 2] if before.startswith('{"attempt": 1}') else [2])


@pytest.mark.parametrize("cut", [0, 1, 7])
def test_a_csv_file_goes_on_after_a_row_that_a_kill_cut_short(cut, tmp_path):
    with open_loggers(["csv"], tmp_path) as log:
        for step in (1, 2, 3):
            log(step, {"loss": 1.5 * step, "lr": 0.25})
    path = tmp_path / "metrics.csv"
    path.write_text(path.read_text()[: -cut or None])
    with open_loggers(["csv"], tmp_path, first=2) as log:
        log(3, {"loss": 4.5, "lr": 0.25})
        log(4, {"loss": 6.0, "lr": 0.25, "val_loss": 1.0})
    assert path.read_text().splitlines() == [
        "step,loss,lr,val_loss", "1,1.5,0.25,", "2,3.0,0.25,", "3,4.5,0.25,", "4,6.0,0.25,1.0",
    ]  # fmt: skip


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_of_another_encoding_does_not_end_a_command(encoding, tmp_path):
    code = "from fzero.cli import process; process.escape_output(); print('x ÷ ∑'); print('\\udce9')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
        capture_output=True, text=True, encoding="latin-1", cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("x \\xf7 \\u2211\n" if encoding == "ascii" else "x ÷ \\u2211\n") + "\\udce9\n"


# ---- files that are not as they were written ----


@pytest.mark.parametrize("name", ["config.json", "environment.json", "tokenizer.json", "chat_template.jinja"])
def test_no_flipped_bit_of_a_run_is_read_as_another_value(name, tmp_path):
    value, chat = from_table({"preset": "mlp-tiny"}), Chat("{{ messages[0].content }} é", {})
    tokenizer = train_bpe(["some text of words, more text " * 20], 262)
    run_folder.create_run(tmp_path, value, tokenizer, chat, {"generation_config.json": "{}"}, corpus="data")

    def read():
        said = run_folder.read_environment(tmp_path)
        return run_folder.read_config(tmp_path), said, run_folder.read_tokenizer(tmp_path).json, read_chat(tmp_path)

    path, rng, sound, refused = tmp_path / name, random.Random(0), read(), 0
    raw = path.read_bytes()
    for _ in range(25):
        new = bytearray(raw)
        new[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(new)
        try:
            found = read()
            assert (found[0], found[2:]) == (sound[0], sound[2:])
        except ValueError as error:
            refused += str(tmp_path) in str(error)
    assert refused > 15
    path.unlink()
    with pytest.raises(ValueError, match=f"{name}: |{tmp_path}: is not a run"):
        read()


IS = {  # what is put in the place of a file, and what an error says that it is
    "fifo": "is a FIFO",
    "folder": "is a folder",
    "dangling": "is a symbolic link to nothing",
    "loop": "is a symbolic link to itself",
    "socket": "is a socket",
    "empty": "is empty|its text is empty|has changed",
}


def put_there(path, kind):
    """Put something else in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("dangling", "loop"):
        path.symlink_to("nothing" if kind == "dangling" else path.name)
    elif kind == "socket":
        folder = os.open(path.parent, os.O_RDONLY)  # its whole path may be too long for a socket
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
    else:
        path.write_text("")


@pytest.mark.parametrize("kind", IS)
def test_what_is_no_file_is_refused_by_what_it_is(kind, tmp_path, fz):
    """By each reader of a run's folder, and never taken for a file that is missing."""
    run_folder.create_run(tmp_path, from_table({"preset": "mlp-tiny"}), train_bpe(["some text " * 20], 262),
                          Chat("{{ messages[0].content }}", {}), corpus="data")  # fmt: skip
    readers = {name: read for name, read in READERS.items() if not any(c in name for c in "*/") and ".gz" not in name}
    readers |= {
        "tokenizer.json": lambda path: run_folder.read_tokenizer(path.parent),
        "chat_template.jinja": lambda path: read_chat(path.parent),
        "meta.json": lambda path: data.read_meta(path.parent),
        "manifest.json": lambda path: checkpoint.read_manifest(path.parent),
        "lock.json": lambda path: (run_lock.acquire(path.parent), run_lock.release(path.parent)),
    }
    lines = ("attempts.jsonl", "samples.jsonl", "metrics.jsonl", "lock.json", "metrics.csv", "chat_template.jinja")
    for name, read in readers.items():
        path, before = tmp_path / name, (tmp_path / name).read_bytes() if (tmp_path / name).exists() else None
        put_there(path, kind)
        if kind == "empty" and name in lines:  # no line yet
            read(path)
        else:
            with pytest.raises((ValueError, OSError), match=IS[kind].partition(" to ")[0]) as raised:
                read(path)
            assert str(path) in str(raised.value) and "no such file" not in str(raised.value)
        remove_entry(path)
        if before is not None:
            path.write_bytes(before)


@pytest.mark.parametrize("name", ["config.json", "environment.json", "metrics.jsonl", "lock.json", "attempts.jsonl"])
@pytest.mark.slow
def test_every_command_says_what_is_in_the_place_of_a_file(name, tmp_path, fz):
    run = begin(fz, tmp_path)
    for kind in ("fifo", "folder", "dangling"):
        whole = (run / name).read_bytes() if (run / name).exists() else None
        put_there(run / name, kind)
        commands = [("pretrain", "--out", run, "--resume")]
        if name != "lock.json":
            commands += [("report", run)]
        if name in ("config.json", "environment.json"):
            commands += [("sample", run, "--prompt", "a"), ("export", run, "--out", tmp_path / "new")]
        if name == "config.json":
            commands += [("ckpt", word, run) for word in ("verify", "ls", "show")]
        for command in commands:
            code, _, err = fz(*command)
            expected = IS[kind].partition(" to ")[0]  # where a link is refused, whatever it leads to
            assert code == 2 and err.count("\n") == 1 and expected in err and str(run / name) in err, (command, err)
        remove_entry(run / name)
        if whole is not None:
            (run / name).write_bytes(whole)
    if name == "config.json":
        (run / name).unlink()
        for word in ("verify", "ls", "show"):
            code, _, err = fz("ckpt", word, run)
            assert code == 2 and f"has no config.json any more; write the entry config of the last line of {run}" in err
        (line,) = run_folder.read_attempts(run)
        (run / name).write_text(json.dumps(line["config"]))
        code, out, err = fz("ckpt", "verify", run)
        assert code == 0 and "sound" in out, err


EDITS = {  # entries of config.json that are changed by hand, and what the error says of each
    "train.seed": (7, "train.seed is 7, and 0 is what the run trained with", "a run keeps this value"),
    "train.batch": (8, "train.batch is 8, and 4 is", "--resume --set train.batch=8"),
    "optim.lr": (0.5, "optim.lr is 0.5, and 0.01 is", "--resume --set optim.lr=0.5"),
    "zero": (2, "zero is 2, and 0 is", "--resume --set zero=2"),
    "data.within_documents": (False, "data.within_documents is False, and True is", "a run keeps this value"),
    "train.ema_decay": (0.5, "train.ema_decay is 0.5, and 0.0 is", "a run keeps this value"),
}


def rewrite(path, table):
    """Write a table without its checksum, as somebody does by hand."""
    path.write_text(json.dumps({key: value for key, value in table.items() if key != run_folder.SEAL}))


def refused_by_all(fz, run, *texts):
    """Each reader refuses the run in one line with these texts, and leaves the folder as it is."""
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock.json"}
    for command in (("pretrain", "--out", run, "--resume"), ("sample", run, "--prompt", "a"), ("report", run)):
        code, _, err = fz(*command)
        assert code == 2 and err.count("\n") == 1 and all(text in err for text in texts), (command, err)
    assert before == {path: path.read_bytes() for path in before}


def test_a_recorded_config_may_have_keys_that_ended_where_they_said_nothing():
    ended = {"fragments": 1, "overlap": 0, "mix": 0.0}
    assert from_table(run_folder.current_keys({"local": dict(ended)})) == from_table({})
    for key in ended:
        for table in ({"local": {key: ended[key]}}, run_folder.current_keys({"local": {key: 0.5}})):
            with pytest.raises(ValueError, match=f"unknown key .local.{key}"):
                from_table(table)


def test_a_config_without_its_checksum_is_the_one_that_the_run_trained_with(tmp_path, fz):
    """By its last attempt, else by its newest checkpoint; and what is damaged is written again from either."""
    run = begin(fz, tmp_path)
    path, written, lines = run / "config.json", read_json(run / "config.json"), (run / "attempts.jsonl").read_text()
    (line,) = run_folder.read_attempts(run)
    for without in ("", "attempts"):
        if without:
            (run / "attempts.jsonl").unlink()
        source = "step-00000004/manifest.json" if without else "attempts.jsonl"
        for key, (value, *texts) in EDITS.items():
            if without and key == "zero":  # of an earlier version, whose attempts may have had other placements
                continue
            table = json.loads(json.dumps(written))
            set_nested(table, key, value)
            rewrite(path, table)
            texts += [str(path), f"the entry config of {'' if without else 'the last line of '}{run}", source]
            with pytest.raises(ValueError) as raised:
                run_folder.read_config(run)
            assert all(text in str(raised.value) for text in texts), raised.value
            if key == "train.seed" and not without:
                refused_by_all(fz, run, *texts)
        rewrite(path, written)
        assert run_folder.read_config(run) == from_table(run_folder.current_keys(written))
        for damaged in ("", path.read_text()[:100]):
            path.write_text(damaged)
            with pytest.raises(ValueError, match=f"{path}: .*write the entry config of .*{source}"):
                run_folder.read_config(run)
        path.write_text(json.dumps(checkpoint.read_manifest(run / "checkpoints/step-00000004")["config"] if without else
                                   line["config"]))  # fmt: skip
        assert run_folder.read_config(run) == from_table(run_folder.current_keys(written))
    # Folders may have moved, and a run of a version that recorded neither is read as it is.
    rewrite(path, {**written, "data": {**written["data"], "path": "/elsewhere/text.txt"}, "mesh": {"dp": 1}})
    assert run_folder.read_config(run).data.path == "/elsewhere/text.txt"
    bare = tmp_path / "bare"
    bare.mkdir()
    rewrite(bare / "config.json", {**written, "zero": 3})
    assert run_folder.read_config(bare).zero == 3
    # The corpus is the one that the last attempt trained on.
    (run / "attempts.jsonl").write_text(lines)
    rewrite(run / "environment.json", {**run_folder.read_environment(run), "corpus_sha256": "0" * 64})
    refused_by_all(fz, run, f"corpus_sha256 is '{'0' * 64}'", line["environment"]["corpus_sha256"], "attempts.jsonl")


@pytest.mark.slow
def test_a_value_that_a_hand_changed_is_changed_by_the_remedy(tmp_path, fz):
    """And a run of several stages has all of them in its record."""
    run = begin(fz, tmp_path)
    for key, (value, _, fix) in EDITS.items():
        if "--set" in fix:
            code, _, err = fz("pretrain", "--out", run, "--resume", "--stop-at", 6, *fix.split()[1:], "--prompt", "")
            assert code == 0, err
            found = run_folder.read_config(run)
            for name in key.split("."):
                found = getattr(found, name)
            assert found == value
            run = begin(fz, tmp_path, name=f"after-{key}")
    code, _, err = fz("pretrain", "--out", run, "--resume", "--stop-at", 6, "--batch", 8, "--prompt", "")
    assert code == 0, err
    table = read_json(run / "config.json")
    rewrite(run / "config.json", table)
    assert run_folder.read_config(run).stages
    rewrite(run / "config.json", {**table, "stages": []})
    refused_by_all(fz, run, "stages is []", "a run keeps this value")


@pytest.mark.slow
def test_weights_of_an_earlier_step_are_said_where_the_newest_checkpoint_is_incomplete(tmp_path, fz):
    run, more = begin(fz, tmp_path), ("--set", "device=cpu", "--steps", 1)
    steps = checkpoint.steps(run / "checkpoints")
    newest = checkpoint.step_folder(run / "checkpoints", steps[-1])
    (newest / "manifest.json").unlink()
    line = f"passed over {newest}: it has no manifest.json: its save is under way, or did not end"
    for words in (
        ("sample", run, "--prompt", "a", "--max-new-tokens", 1),
        ("ckpt", "show", run),
        ("pretrain", "--init", run, "--data", run / "data", "--seq-len", 16, "--batch", 2, "--micro-batch", 2, *more,
         "--set", "train.compiled=false", "--prompt", "", "--out", tmp_path / "new"),
    ):  # fmt: skip
        code, out, err = fz(*words)
        assert code == 0 and (out + err).count(line) == 1, (words, out, err)
    code, _, err = fz("ckpt", "show", checkpoint.step_folder(run / "checkpoints", steps[-2]))  # by its own name
    assert (code, err) == (0, "")
    assert (weights.load(run).step, weights.load(run).warnings) == (steps[-2], [line])


KINDS = {  # further words of a run, and what its resume changes
    "ramp": (("--batch", 8, "--batch-ramp", "4:4:128"), ("--steps", 10)),
    "disk": (("--offload", "params=nvme,opt=nvme"), ("--lr", 0.02)),
    "stages": (("--precision", "bf16", "--set", "optim.name=muon"), ("--seq-len", 8, "--batch", 8, "--steps", 12)),
    "schedule": (("--set", "optim.schedule.name=linear"), ("--set", "optim.clip=0.5")),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_config_without_its_checksum_is_read_as_it_was_written(kind, tmp_path, fz):
    """Of runs whose attempts have other values than config.json: of one of its stages, and after a resume."""
    words, changes = KINDS[kind]
    run = begin(fz, tmp_path, *words)
    for stop in (7, None):
        wanted, table = run_folder.read_config(run), read_json(run / "config.json")
        rewrite(run / "config.json", table)
        assert run_folder.read_config(run) == wanted
        rewrite(run / "config.json", {**table, "train": {**table["train"], "seed": 3}})
        with pytest.raises(ValueError, match=r"train\.seed is 3, and 0 is what"):
            run_folder.read_config(run)
        rewrite(run / "config.json", table)
        if stop:
            code, _, err = fz("pretrain", "--out", run, "--resume", *changes, "--stop-at", stop, "--prompt", "")
            assert code == 0, err
    # A record of keys that this version does not have is none to compare with.
    rewrite(run / "config.json", {**table, "train": {**table["train"], "seed": 3}})
    (*lines, last) = (run / "attempts.jsonl").read_text().splitlines()
    old = {"a_key_of_long_ago": 1, **json.loads(last)["config"]}
    (run / "attempts.jsonl").write_text("\n".join([*lines, json.dumps({"attempt": 2, "config": old})]) + "\n")
    assert run_folder.read_config(run).train.seed == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "words"])
def test_no_file_of_a_run_that_is_not_as_it_was_written_leads_to_a_hang_or_another_result(kind, tmp_path, fz):
    expect_no_faults(fz, tmp_path, kind, seed=0, most=10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", damaged_runs.RUNS)
def test_no_file_of_a_run_at_all(kind, tmp_path, fz):
    expect_no_faults(fz, tmp_path, kind, seed=int(np.random.default_rng().integers(1 << 30)))


def expect_no_faults(fz, folder, kind, seed, most=None):
    """Run a command on a copy of a run with one damaged file, for all cases or for `most`."""
    runs, rng = damaged_runs.Runs(fz, folder, kind), random.Random(seed)
    found = {case: problem for case in runs.cases(rng)[:most] if (problem := runs.faults(*case, rng))}
    assert not found, json.dumps({str(case): problem for case, problem in found.items()}, indent=1)

"""Runs of each kind with one file damaged, and what every command says of them (tests/test_run_files.py).

The law: a command ends with one line, or with the result that it has on the sound run. It does not hang, has no
traceback and changes no other file.
"""

import hashlib
import json
import os
import re
import shutil
import signal
from pathlib import Path

from fzero.run import run_folder

CASE_S = 240  # a FIFO that is waited for never ends
KINDS = ("link", "dangling", "fifo", "folder", "missing", "flipped", "cut", "empty")
SETTINGS = (
    "device=cpu",
    "train.compiled=false",
    "precision.fp32_matmul=default",
    "train.eval_every=2",
    "train.checkpoint_every=2",
    'train.loggers=["csv"]',
)
QUICK = ("--set", "device=cpu", "--set", "train.compiled=false")
MLP = ("--model", "mlp-tiny", "--seq-len", 16)
SMALLER = ("--set", "model.n_layers=2", "--set", "model.d_model=32", "--set", "data.tokenizer=bpe:300")
LLAMA = ("--model", "llama-tiny", "--seq-len", 16, *SMALLER)
WORDS = ("--steps", 8, "--batch", 4, "--micro-batch", 2, "--peak-tflops", 1, "--lr", 0.01)
FP32 = ("--precision", "fp32")
RUNS = {  # by kind: the words that start the run
    "memory": ("pretrain", *MLP),
    "host": ("pretrain", *MLP, "--offload", "opt=host"),
    "disk": ("pretrain", *MLP, "--offload", "params=nvme,opt=nvme", "--set", "nvme.slots=3"),
    "disk of masters": ("pretrain", *MLP, "--offload", "opt=nvme", "--precision", "bf16"),
    "words": ("pretrain", *LLAMA),
    "lora": ("finetune", "--chat-template", "TEMPLATE", "--init", "BASE", "--lora", "rank=2,on=attn", "--seq-len", 16),
}
COMMANDS = {
    "resume": ("pretrain", "--out", "RUN", "--resume", "--prompt", "a"),
    "auto": ("--out", "RUN", "--auto-resume"),  # behind the words that started the run
    "sample": ("sample", "RUN", "--prompt", "a", "--max-new-tokens", 3, "--device", "cpu"),
    "report": ("report", "RUN"),
    "export": ("export", "RUN", "--out", "NEW"),
    "replay": ("replay", "RUN", "--step", 4, "--device", "cpu"),
    "bisect": ("bisect", "RUN", "FULL", "--device", "cpu"),
    "ls": ("ckpt", "ls", "RUN"),
    "show": ("ckpt", "show", "RUN"),
    "verify": ("ckpt", "verify", "RUN"),
    "diff": ("ckpt", "diff", "RUN/checkpoints/step-00000004", "SOUND/checkpoints/step-00000004"),
    "data": ("data", "verify", "RUN/data"),
    "batch": ("data", "show", "RUN", "--step", 3),
    "init": (
        "pretrain", *QUICK, *WORDS[2:], *FP32, "--init", "RUN", "--data", "RUN/data", "--seq-len", 16, "--out", "NEW",
        "--steps", 1,
    ),
}  # fmt: skip
RECORDS = ("metrics.jsonl", "attempts.jsonl", "samples.jsonl", "metrics.csv", "ledger.json", "memory.json", "plan.json")


class Runs:
    """A run of each kind in `folder`, sound, and what each command says of it.

    fz: a function that runs the command line: (exit code, stdout, stderr).
    """

    def __init__(self, fz, folder, kind):
        self.fz, self.folder, self.kind = fz, Path(folder), kind
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run, self.full, self.work = self.folder / "run", self.folder / "full", self.folder / "work"
        self.new, self.outside = self.folder / "new", self.folder / "outside"
        (self.folder / "text.txt").write_text("\n".join(f"line {i}: {i * i}" for i in range(300)))
        chats = ({"messages": [turn("user", f"{i}?"), turn("assistant", f"{i * i}")]} for i in range(300))
        (self.folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
        (self.folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        settings = [word for setting in SETTINGS for word in ("--set", setting)]
        if "BASE" in RUNS[kind]:
            self.call("pretrain", *LLAMA, *WORDS, *FP32, *settings, "--data", "TEXT", "--out", self.folder / "base")
        precision = () if "--precision" in RUNS[kind] else FP32
        self.start = (
            *RUNS[kind],
            *WORDS,
            *precision,
            *settings,
            "--data",
            "CHATS" if kind == "lora" else "TEXT",
            "--prompt",
            "a",
        )
        self.call(*self.start, "--stop-at", 4, "--out", self.run)
        shutil.copytree(self.run, self.full)
        self.call("pretrain", "--out", self.full, "--resume", "--prompt", "a")
        shutil.copyfile(self.full / "samples.jsonl", self.run / "samples.jsonl")
        self.files = sorted(str(path.relative_to(self.run)) for path in self.run.rglob("*") if path.is_file())
        self.sound = {}

    def sound_of(self, command):
        """(exit code, answer) of a command on the sound run."""
        if command not in self.sound:
            self.lay()
            code, out, _ = self.call(*self.words(command), may_fail=True)
            self.sound[command] = (code, self.answer(command, out))
        return self.sound[command]

    def call(self, *words, may_fail=False):
        places = {"RUN": self.work, "NEW": self.new, "FULL": self.full, "TEXT": self.folder / "text.txt"}
        places |= {"BASE": self.folder / "base", "SOUND": self.run, "CHATS": self.folder / "chats.jsonl"}
        places["TEMPLATE"] = self.folder / "chat.jinja"
        words = [
            re.sub(r"^(RUN|NEW|FULL|TEXT|BASE|SOUND|CHATS|TEMPLATE)\b", lambda m: str(places[m[0]]), str(word))
            for word in words
        ]
        code, out, err = self.fz(*words)
        assert may_fail or code == 0, (words, err)
        return code, out, err

    def cases(self, rng):
        """(file, kind of damage, command) of the run in any order: one file of each role with every command, and the
        others of that role with one."""
        roles, found = {}, []
        for name in self.files:
            roles.setdefault(role_of(name), []).append(name)
        for names in roles.values():
            first = rng.choice(names)
            found += [(first, kind, command) for kind in KINDS for command in COMMANDS]
            rest = [name for name in names if name != first]
            found += [(name, kind, rng.choice(("resume", "verify", "sample"))) for name in rest for kind in KINDS]
        rng.shuffle(found)
        return found

    def words(self, command):
        words = COMMANDS[command]
        return (*self.start, *words) if command == "auto" else words

    def lay(self):
        """A copy of the run in `work`, and nothing in `new` and `outside`."""
        for folder in (self.work, self.new, self.outside):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.run, self.work)
        self.outside.mkdir()

    def answer(self, command, out):
        """The numbers that a command ends with."""
        if command in ("resume", "auto", "init"):
            folder = self.new if command == "init" else self.work
            after = 0 if command == "init" else 4  # the rows before it are a record that may be damaged
            rows = {row["step"]: row["loss"] for row in run_folder.read_metrics(folder) if row["step"] > after}
            return rows, (folder / "samples.jsonl").read_bytes().splitlines()[-1:]
        if command == "export":
            return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(self.new.rglob("*"))}
        if command == "report":
            return {path: digest_of(path) for path in sorted((self.work / "report").glob("*.json"))}
        if command == "replay":
            return [line for line in out.splitlines() if "loss" in line or "same" in line]
        if command in ("sample", "show", "diff", "batch"):
            return out
        return None

    def faults(self, name, kind, command, rng):
        """What is wrong with a command on the run of which the file `name` is damaged; "" for nothing."""
        sound = self.sound_of(command)
        self.lay()
        damage(self.work / name, kind, self.outside, rng)
        before = content(self.outside) | content(self.full, top=True)

        def alarm(number, frame):
            raise TimeoutError("hangs")

        old = signal.signal(signal.SIGALRM, alarm)
        signal.alarm(CASE_S)
        try:
            code, out, err = self.call(*self.words(command), may_fail=True)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, old)
        problem = ""
        if code not in (0, 1, 2) or any(word in err for word in ("fault of fzero", "Traceback", "hangs")):
            problem = f"exit code {code}: {err[-500:]}"
        if (code == 0) != ("fzero: error" not in err) and command not in ("verify", "diff", "replay", "bisect", "data"):
            problem += f"exit code {code} with {err[-300:]}"
        if code == 2 and err.count("fzero: error") != 1:
            problem += f"exit code 2 with {err[-300:]}"
        if before != content(self.outside) | content(self.full, top=True):
            problem += "a file outside has changed"
        if not problem and code == 0 and sound[0] == 0 and not self.may_differ(name, command):
            found = self.answer(command, out)
            said = (
                "passed over" in out + err or "damaged" in out + err
            )  # an earlier checkpoint serves, and a line says so
            problem += "" if said or found == sound[1] else f"other results: {str(found)[:300]} {out[-300:]}"
        return problem

    def may_differ(self, name, command):
        """Whether a file is a record whose numbers a command shows."""
        return (command == "report" and name in RECORDS) or (command in ("replay", "bisect") and name in RECORDS)


def turn(role, content):
    """A message of a conversation."""
    return {"role": role, "content": content}


def role_of(name):
    """What a file of a run is for: the arrays of parameters, of moments and the others of a checkpoint are alike."""
    return re.sub(r"(/arrays/(params|master|opt_state)?).*/(c|zarr)", r"\1 \3", re.sub(r"/c/[\d/]*$", "/c", name))


def digest_of(path):
    """The digest of a report, but for what it says of this machine's free memory."""
    lines = [line for line in path.read_text().splitlines() if not re.search("(memory|capacity|margin)_bytes", line)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def content(folder, *, top=False):
    """{path: bytes} of the files of a folder."""
    found = folder.iterdir() if top else folder.rglob("*")
    return {path: path.read_bytes() for path in found if path.is_file()}


def damage(path, kind, outside, rng):
    """Put something else in the place of a file."""
    raw = path.read_bytes()
    copy = outside / "copy"
    copy.write_bytes(raw)
    path.unlink()
    if kind in ("link", "dangling"):
        path.symlink_to(copy if kind == "link" else outside / "nothing")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind != "missing":
        new = bytearray(raw if kind == "flipped" else raw[: len(raw) // 2] if kind == "cut" else b"")
        if new and kind == "flipped":
            new[rng.randrange(len(new))] ^= 1 << rng.randrange(8)
        path.write_bytes(new)

"""Attempts of a run: a line of attempts.jsonl for each start of its loop, with the facts that its figures depend on."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

import fzero
from fzero.core import gpu
from fzero.core.config_tables import Table
from fzero.core.files import append_line
from fzero.core.text_parsing import json_text
from fzero.run.config.config_table import to_table
from fzero.run.config.placement import CORPUS, WHOLE
from fzero.run.measure.flops import TokenFlop
from fzero.run.setup import machine as doctor
from fzero.run.setup import run_folder
from fzero.run.setup.build import Attempt, local_micro_batches, num_params

PLAN = "plan.json"


def begin(attempt: Attempt, first: int, flop: TokenFlop) -> int:
    """Write the line of an attempt that continues after step `first`; returns its number, from 1 on."""
    job, folder, _, coordinator, options, run_config = attempt
    config, t = job.config, job.config.train
    trained_on = run_folder.read_environment(folder)
    number = len(run_folder.read_attempts(folder)) + 1
    commit, dirty = commit_of(Path(__file__).parent)
    line = {
        "attempt": number,
        "first_step": first,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
        "config_sha256": hashlib.sha256((folder / run_folder.CONFIG).read_bytes()).hexdigest(),
        "commit": commit,
        "dirty": dirty,
        "processes": coordinator.size,
        "mesh": {axis.name: axis.size for axis in job.mesh.axes},
        "zero": config.zero,
        "offload": config.offload,
        "update": t.update,
        "micro_batches": local_micro_batches(config, job.mesh),
        "device": gpu.describe_device(job.device),
        "threads": torch.get_num_threads(),
        "compiled": bool(t.compiled),
        "precision": config.precision.policy,
        "fp32_matmul": doctor.fp32_matmul(),
        "num_params": num_params(job),
        "tokens_per_step": t.batch * config.data.seq_len,
        "flop_per_token": flop.model,
        "flop_per_token_causal": flop.model_causal,
        "hardware_flop_per_token": flop.hardware,
        "hardware_flop_per_token_causal": flop.hardware_causal,
        "peak_flops": options.peak_flops,
        "peak_measured": options.peak_measured,
        "versions": {"fzero": fzero.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": machine(),
        "environment": {key: trained_on[key] for key in CORPUS if key in trained_on},
        "config": to_table(config),  # a resumed run may have another mesh, stage and offload than config.json
    }
    if run_config != config:
        line[WHOLE] = to_table(run_config)
    path = folder / run_folder.ATTEMPTS
    append_line(path, json_text(line, str(path)))
    return number


def commit_of(folder: Path) -> tuple[str, bool]:
    """(the commit of the checkout that `folder` is in, whether files were changed since); ("", False) without."""
    if not (folder.parent / ".git").exists():  # installed, perhaps below somebody else's checkout
        return "", False

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return "", False


def machine() -> Table:
    """The facts of this machine that figures depend on; its name as a hash."""
    return {
        "cpu": doctor.processor(),
        "cores": doctor.cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:12],
    }

"""The run behind `fzero pretrain`: a corpus, a program, a loop over steps, and a run folder that says what happened."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from fzero import data
from fzero.core.storage import is_url
from fzero.core.tables import Table
from fzero.data.tokens import read_meta
from fzero.run import corpus, machine, run_folder
from fzero.run import weights as weights_module
from fzero.run.build import build, first_state, num_params
from fzero.run.config import RunConfig
from fzero.run.config_checks import check_vocabulary
from fzero.run.config_table import from_json, to_json, updated
from fzero.run.loop import ALONE, Options, finish
from fzero.run.measure.flops import token_flop
from fzero.run.memory_check import check_memory
from fzero.run.ranks.coordinator import TIMEOUT_S, Coordinator
from fzero.run.ranks.elastic import refitted
from fzero.run.resume import auto_resume, rollback
from fzero.run.resume.newest_state import expect_disk, expect_new, newest_state
from fzero.sharding import Mesh


def start(
    config: RunConfig,
    folder: Path,
    *,
    team: Coordinator = ALONE,
    grow_vocabulary: bool = True,
    init: Path | None = None,
    auto: bool = False,
    options: Options,
) -> int:
    """Run a new run in the free `folder`; returns the signal that stopped it, or 0.

    grow_vocabulary: give the model as many tokens as the corpus has, where those are more. init: take the weights of this run. auto:
    `folder` may hold what an attempt left that did not come to train; a mesh that does not fit the processes is changed, as in `resume`.
    Raises ValueError for whatever is wrong before anything is trained; `folder` is then as it was.
    """
    there, mesh_lines = team.share(lambda: auto_resume.take(folder, auto=auto)), []
    if auto and (math.prod(config.mesh.values()) != team.size or not config.mesh):
        sizes, line = refitted(config, config.mesh or {"dp": team.size}, team.size)
        config, mesh_lines = replace(config, mesh=sizes), [line]
        team.keep(math.prod(sizes.values()))
    team.record(str(folder.absolute()))
    if team.spare:
        return 0
    weights = weights_module.load(init, wide=True) if init else None
    config, mesh, lines = place(config, team)
    if config.data.path != "stdlib":
        config = replace(config, data=replace(config.data, path=str(Path(config.data.path).absolute())))
    if (home := config.train.checkpoints) and not is_url(home):
        config = replace(config, train=replace(config.train, checkpoints=str(Path(home).absolute())))
    program = build(config, mesh, folder)
    check_memory(program, machine.available_bytes() // team.local_size)
    expect_disk(program, team)
    expect_new(program, folder, team)
    try:
        team.share(lambda: auto_resume.begin(folder))
        path = Path(team.share(lambda: str(corpus.find_corpus(config.data, folder, options.say))))
        size = read_meta(path)["vocab_size"]
        if grow_vocabulary and size > config.model.vocab_size:
            options.say(f"the corpus has {size:,} tokens: model.vocab_size is {size} in place of {config.model.vocab_size}")
            config = replace(config, model=replace(config.model, vocab_size=size))
            program = build(config, mesh, folder)
        check_vocabulary(config, path)
        compare_corpus(path, team)
        corpus.open_data(config, path, mesh)
        state = first_state(program, weights.params if weights else None)
        if team.first:
            run_folder.create(
                folder,
                config,
                data.load_tokenizer(path),
                corpus=run_folder.DATA if path == folder / run_folder.DATA else str(path.resolve()),
                corpus_sha256=corpus.digest(path),
                init=str(init.resolve()) if init else "",
                num_params=num_params(program),
                flop_per_token=token_flop(program).model,
                processes=team.size,
            )
            auto_resume.begun(folder)
    except BaseException:
        if team.first:
            run_folder.clear(folder, keep=there)
        raise
    for line in [*(weights.warnings if weights else []), *mesh_lines, *lines]:
        options.say(line)
    return finish(program, state, folder, path, team, options)


def resume(folder: Path, *, team: Coordinator = ALONE, changes: Table | None = None, auto: bool = False, options: Options) -> int:
    """Go on with the run in `folder` from its newest sound checkpoint, by its own config; returns as `start`.

    changes: values of the config about the mesh, which may be another one now; where the run's own does not fit the processes and none
    is given, it is the nearest that does (see run/ranks/elastic.py), and the processes that it leaves over are spares, for whom this
    returns at once. auto: so where the given one does not fit too; and a run that has made its steps is no mistake.
    Raises ValueError where `folder` is no run, its corpus is another one now, or every checkpoint is damaged.
    """
    text, said = team.share(lambda: [to_json(run_folder.read_config(folder)), run_folder.read_environment(folder)])
    config, changes = from_json(text, str(folder)), dict(changes or {})
    kept = config
    if not said.get("corpus"):
        raise ValueError(f"{folder}: holds imported weights, not a training run; start one from them with --init {folder}")
    team.record(str(folder.absolute()))
    team.share(lambda: auto_resume.begun(folder))
    before, given = config.mesh, changes.pop("mesh", None)
    sizes, mesh_lines = before if given is None else given, []
    if math.prod(sizes.values()) != team.size and (auto or given is None):
        sizes, line = refitted(updated(config, changes), sizes, team.size)
        mesh_lines = [line]
        team.keep(math.prod(sizes.values()))
        if team.spare:
            return 0
    config, mesh, lines = place(replace(updated(config, changes), mesh=sizes), team)
    program = build(config, mesh, folder)
    check_memory(program, machine.available_bytes() // team.local_size)
    path = folder / said["corpus"]  # an absolute path stays what it is
    if config.data.path == "stdlib":
        path = Path(team.share(lambda: str(path if path.exists() else corpus.find_corpus(config.data, folder, options.say))))
    if corpus.digest(path) != said["corpus_sha256"]:
        raise ValueError(f"{path}: is not the corpus this run began with; put that one back, or start a new run")
    team.share(lambda: rollback.finish_rollback(folder))
    state = newest_state(program, folder, team, options.say, Path(said["init"]) if said["init"] else None)
    kept = replace(kept, offload=config.offload, nvme=config.nvme, precision=config.precision)
    team.share(lambda: run_folder.replace_config(folder, kept))  # where the state is from now on
    step = int(state.step)
    last = min(config.train.steps, options.stop_at or config.train.steps)
    if auto and step >= last:
        options.say(f"{folder}: {'is complete: it ' if last == config.train.steps else ''}has made its {step} steps")
        return 0
    if step >= config.train.steps:
        raise ValueError(f"{folder}: is complete: it has made its {step} steps; a longer run is a new one (--out)")
    if options.stop_at is not None and options.stop_at <= step:
        raise ValueError(f"--stop-at {options.stop_at}: the run has made {step} steps already; give a larger number, or none")
    team.share(lambda: run_folder.cut_metrics(folder, step))
    options.say(f"resuming {folder} at step {step} of {config.train.steps}")
    for line in [*mesh_lines, *lines] if team.size > 1 or mesh_lines else ():
        options.say(line)
    if before != config.mesh and not mesh_lines:
        old = ", ".join(f"{axis}={size}" for axis, size in before.items())
        options.say(f"on {mesh}, before that on {f'Mesh({old})' if old else 'one process'}")
    return finish(program, state, folder, path, team, options)


def place(config: RunConfig, team: Coordinator) -> tuple[RunConfig, Mesh, list[str]]:
    """(the config with its mesh and every "auto" decided, the mesh, lines that say so); rank 0 decides for all.

    Sets how the process makes float32 products, and on how many threads.
    """
    lines = []
    if team.size > 1 and not config.mesh:
        config = replace(config, mesh={"dp": team.size})
        lines.append(f"mesh: dp={team.size}, all {team.size} processes (--mesh says otherwise)")
    # Behind the watchdog, which knows more of a rank that is late.
    mesh = team.mesh(config.mesh, max(TIMEOUT_S, config.train.hang_s + 60.0))
    if team.size > 1:
        lines.append(machine.share_cores(team.local_size))

    def decide() -> tuple[str, list[str]]:
        resolved, lines = machine.resolve_here(config)
        return to_json(resolved), lines

    text, said = team.share(decide)
    config = from_json(text)
    if not team.first:
        machine.resolve_here(config)  # nothing is left to decide: it sets, and refuses what is not here
    return config, mesh, [*lines, *said]


def compare_corpus(path: Path, team: Coordinator) -> None:
    """Raise ValueError naming the rank that finds another corpus at `path` than rank 0."""
    fix = "give all hosts the same files, such as a folder that all of them see"
    team.compare({f"the SHA-256 of {path}/meta.json": corpus.digest(path)}, fix)

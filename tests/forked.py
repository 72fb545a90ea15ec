"""`fzero` and scripts in processes that are forked from one which has torch and fzero loaded: a page of many commands
imports them once.

`programs()` is a folder for PATH with the programs `fzero`, `script` (FILE or -m MODULE) and `torchrun`, of which the
ranks are forks too. They hand their arguments, environment, folder, cores and open files to that process and
end as the fork does, by the same signal. SIGINT and SIGTERM are handed on; where a program is killed, so is its fork.
`fork_of(pid)` is the fork behind a program. As in tests, no run draws pictures, but where PICTURES is set."""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

CLIENT = """#!{python} -SE
import json, os, signal, socket, sys
cores = sorted(os.sched_getaffinity(0))
said = json.dumps([os.getpid(), sys.argv, os.getcwd(), dict(os.environ), cores]).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [len(said).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(said)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    code = server.recv(1)
if code and code[0] > 192:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), 256 - code[0])
sys.exit(code[0] if code else 1)
"""
PRELOAD = [
    "fzero.cli.main",
    "fzero.core.compile",
    "fzero.planner.plan",
    "fzero.report.report_writer",
    "fzero.run.runner.loop",
    "fzero.run.setup.coordinator",
    "matplotlib.backends.backend_agg",
    "torch._decomp.decompositions_for_jvp",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.run",
]


@functools.cache
def programs():
    """The folder with the programs; the process behind them ends with this one."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    address = f"{folder.name}/socket"
    for program in (Path(folder.name, name) for name in ("fzero", "script", "torchrun")):
        program.write_text(CLIENT.format(python=sys.executable, address=address))
        program.chmod(0o755)
    paths = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    # Else Inductor starts processes of its own before the fork.
    environment = {**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    assert server.stdout.readline() == b"ready\n"
    atexit.register(server.kill)
    return folder.name


def fork_of(pid):
    """The process id of the fork behind a program; of another process its own."""
    for comm in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            if comm.read_text() == f"for {pid}\n":
                return int((comm.parent / "task" / comm.parent.name / "children").read_text())
    return pid


def serve(address):
    """Fork for each command until the standard input is closed. Returns in the fork, whose arguments, environment,
    folder, cores and open files are those of the program."""
    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that attend to a program
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        while listening in select.select([listening, sys.stdin], [], [])[0]:
            with listening.accept()[0] as program:
                if not os.fork():
                    listening.close()
                    attend(program)
                    return True
    return False


def attend(program):
    """Fork once more: returns in the fork. The other process hands signals on, answers with the exit code, and ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, *_ = socket.recv_fds(program, 8, 3)
    said = b""
    while len(said) < int.from_bytes(size, "big"):
        said += program.recv(1 << 16)
    pid, *how = json.loads(said)
    child = os.fork()
    if not child:
        program.close()
        become(*how, files)
        return
    Path("/proc/self/comm").write_text(f"for {pid}")
    for file in files:
        os.close(file)
    end = os.pidfd_open(child)
    while end not in select.select([end, program], [], [])[0]:
        number = program.recv(1)
        os.kill(child, number[0] if number else signal.SIGKILL)
        if not number:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):  # the program is gone
        program.sendall(bytes([code & 255]))
    os._exit(0)


def become(arguments, folder, environment, cores, files):
    import torch

    from fzero.report import curves

    if "PICTURES" not in environment:
        curves.write_pictures = lambda folder: []
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or len(cores)))
    sys.argv = arguments


def run_program(name):
    """What `name` does with sys.argv."""
    if name == "fzero":
        from fzero.cli import main

        main.main()
    elif name == "torchrun":
        from torch.distributed import run

        os.environ["PYTHON_EXEC"] = str(Path(sys.argv[0]).with_name("script"))
        run.main(sys.argv[1:])
    else:
        del sys.argv[: 2 if sys.argv[1] == "-u" else 1]
        if sys.argv[0] == "-m":
            del sys.argv[0]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
            runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__" and serve(sys.argv[1]):
    run_program(Path(sys.argv[0]).name)

"""Runs of the algorithm files, as the tests make them: in this process, in processes forked from a
warm server, and what they leave behind.

`run_here` is `python FILE FLAGS` in this process, where a test can patch things. `forked` calls a
function in fresh processes, `command` runs a file's command line there: each is forked from a
server that has imported torch, transformers and all algorithm files, and starts at once. It is a
process of its own: it can be killed, and several are ranks.
"""

import faulthandler
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from common.batch import Rollout
from common.launch import launch
from common.run import Run
from common.tasks.reward import Verdict
import torch
from torch.distributed import TCPStore
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checks import run_of
from checks.files import MODULES

ROOT = Path(__file__).parent.parent
SMALL = "--prompts_per_step 4 --minibatches 2 --group_size 4".split()
SMALL += "--eval_problems 8 --eval_samples 1 --eval_every 2 --save_every 2".split()
CLOCKED = ("tokens_per_s", "problems")  # the second only stands where a checkpoint follows
PROCESS_SECONDS = 600  # after which a process that does not end is killed


def small(algorithm: str) -> list[str]:
    """Return the flags of a small run in which the algorithm acts within six steps."""
    return [*SMALL, *run_of(algorithm).small.split()]


def module_of(algorithm: str) -> object:
    """Import an algorithm file by its stem."""
    return importlib.import_module(MODULES[algorithm])


def packed(prompts: list[list[int]], tokens: list[list[int]]) -> Rollout:
    """Return responses to prompts, one or several to each, as a sampler with log-probs of 0."""
    logps = [[0.0] * len(row) for row in tokens]
    return Rollout.pack(prompts=prompts, tokens=tokens, logps=logps, eos=[1], device="cpu")


# In this process


def run_here(main: Callable, *flags: object) -> int:
    """Run `python file.py FLAGS` in this process, and return the exit code."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    argv, handlers = sys.argv, {number: signal.getsignal(number) for number in signals}
    sys.argv = ["grpo.py", *map(str, flags)]
    try:
        launch(main, sys.modules[main.__module__].Args)
        return 0
    except SystemExit as stop:
        return stop.code
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)


# In forked processes


@dataclass
class Ended:
    """The end of forked processes: their exit codes, and all that they printed."""

    codes: list[int]
    stdout: str
    stderr: str

    @property
    def returncode(self) -> int:
        """Return the first exit code that is not 0 (a negative one is a signal)."""
        return next(filter(None, self.codes), 0)


def drive(algorithm: str, flags: Sequence, number: int = 0, step: int = 0) -> None:
    """Run `python FILE FLAGS`. Before a step's metrics, the last rank gets a signal by number."""
    log, module = Run.log, module_of(algorithm)

    def signal_and_log(self: Run, done: int, metrics: dict, minibatches: Sequence = ()) -> None:
        if number and done == step and self.world.rank == self.world.size - 1:
            signal.raise_signal(number)
        log(self, done, metrics, minibatches)

    Run.log = signal_and_log
    sys.argv = [f"{algorithm}.py", *map(str, flags)]
    launch(module.main, module.Args)


def forked(job: Callable, *arguments: object, ranks: int = 1) -> Ended:
    """Call a function of a module in a fresh process, or in each of several ranks."""
    context = multiprocessing.get_context("forkserver")
    # A server that is warm: what a run imports late is imported here
    late = "matplotlib.pyplot transformers.models.qwen3.modeling_qwen3 pyparsing.testing"
    late += " transformers.models.qwen3_moe.modeling_qwen3_moe torch.distributed.checkpoint"
    preloaded = ["common", *MODULES.values(), *late.split(), "tests.loop.ranks"]
    context.set_forkserver_preload(preloaded)
    shared = {}
    if ranks > 1:
        # As torchrun does: the ranks' store outlives each of them.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {"WORLD_SIZE": str(ranks), "MASTER_PORT": str(store.port)}
        shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in map(str, range(ranks)):
            own = shared | {"RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
            child_args = (Path(folder), own, job, arguments)
            processes.append(context.Process(target=child, args=child_args, daemon=True))
            processes[-1].start()
        wait_for(processes)
        texts = [Path(folder, name).read_text() for name in ("stdout", "stderr")]
    return Ended([process.exitcode for process in processes], *texts)


def wait_for(processes: list) -> None:
    """Wait until all have ended. If one fails, the others have some seconds to notice."""
    patience = PROCESS_SECONDS
    while left := [process for process in processes if process.exitcode is None]:
        ended = multiprocessing.connection.wait([process.sentinel for process in left], patience)
        if not ended:
            for process in left:
                process.kill()
        if any(process.exitcode for process in processes):
            patience = 20


def child(folder: Path, environment: dict[str, str], job: Callable, arguments: tuple) -> None:
    """Do the job in the forked process, with output files and an environment of its own."""
    os.environ |= environment
    os.chdir(ROOT)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", errors="backslashreplace", closefd=False, buffering=1)
    faulthandler.enable()  # a crash below Python says in which threads
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is inherited as ignored
    job(*arguments)


def command(algorithm: str, *flags: object, at: tuple = (), ranks: int = 1) -> Ended:
    """Run `python FILE FLAGS`, on one rank or several. `at` is (signal, step), for `drive`."""
    return forked(drive, algorithm, flags, *at, ranks=ranks)


def started(*words: object, **environment: str) -> subprocess.CompletedProcess:
    """Start a real `python WORDS` from the repository's root. It takes some seconds of imports."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
    )


# What runs leave behind


def scored(verdicts: list[Verdict]) -> list[float]:
    return [verdict.score for verdict in verdicts]


def metrics(folder: Path) -> list[dict]:
    """Return metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for name in [name for name in line if "seconds" in name or name in CLOCKED]:
            del line[name]
    return lines


def tree(folder: Path) -> dict[Path, bytes | None]:
    """Return everything below a folder, with the files' bytes."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def saved_state(folder: Path, step: int, scratch: Path) -> tuple[dict, dict]:
    """Return all weights of a sharded checkpoint by name, and the optimiser's state of each."""
    dcp_to_torch_save(folder / f"checkpoints/step_{step:06d}/shards", scratch / "whole.pt")
    saved = torch.load(scratch / "whole.pt", weights_only=False)
    return saved["policy"], saved["optimizer"]["state"]


def assert_same_run(run: Path, other: Path, step: int, scratch: Path) -> None:
    """Check that metrics, samples, and weights and moments at a step are the same, to the bit."""
    assert metrics(run) == metrics(other)
    shown = [(folder / "samples.jsonl").read_bytes() for folder in (run, other)]
    assert shown[0] == shown[1] and shown[0]
    saved, again = (saved_state(folder, step, scratch) for folder in (run, other))
    torch.testing.assert_close(saved, again, rtol=0, atol=0)
    assert all(len(part) > 20 for part in saved)


def refused(patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *words: object) -> str:
    """Run `python -m WORDS` here, with exit code 2, and return its one line on stderr."""
    program = str(words[0])
    patch.chdir(ROOT)
    patch.setattr(sys, "argv", [*map(str, words)])
    for name in (program, f"{program}.__main__"):  # as if nobody had imported it
        patch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    output = capsys.readouterr()
    assert stop.value.code == 2 and output.err.count("\n") == 1 and not output.out, output
    return output.err

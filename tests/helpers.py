"""Runs of the algorithm files, as the tests make them: in this process, in processes forked from a
warm server, and what they leave behind.

`run_here` is `python FILE FLAGS` in this process, where a test can patch things. `forked` calls a
function in fresh processes, `command` runs a file's command line there: each is forked from a
server that has imported torch, transformers and all algorithm files, and starts at once. It is a
process of its own: it can be killed, and several are ranks.
"""

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import common  # noqa: F401  (before torch)
import pytest
import torch
from common.plumbing.launch import launch
from torch.distributed import TCPStore
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checks.files import ALGORITHMS, MODULES, VARIANTS
from tests.driver import drive

ROOT = Path(__file__).parent.parent
# Long runs of the variants are CI's: `pytest -m variants`
RUN = [pytest.param(n, marks=pytest.mark.variants) if n in VARIANTS else n for n in ALGORITHMS]
SMALL = "--prompts_per_step 4 --minibatches 2 --group_size 4".split()
SMALL += "--eval_problems 8 --eval_samples 1 --eval_every 2 --save_every 2".split()
# What makes an algorithm act within 6 small steps
MORE = {"vcpo": ["--lag", 1], "goldilocks": "--candidates 4 --teacher_batch 8 --window 20".split()}
SECONDS = 240  # after which a process that does not end is killed


def module_of(algorithm: str) -> object:
    """An algorithm file, imported, by its stem."""
    return importlib.import_module(MODULES[algorithm])


# In this process


def run_here(main: Callable, *flags: object) -> int:
    """`python file.py FLAGS` in this process; returns the exit code."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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


def no_curves(folder: Path) -> Path:
    """In place of `draw_curves`, which takes longer than the rest of a small run."""
    (folder / "curves.png").touch()
    return folder / "curves.png"


# In forked processes


@dataclass
class Ended:
    """What came of forked processes: their exit codes, and what they said together."""

    codes: list[int]
    stdout: str
    stderr: str

    @property
    def returncode(self) -> int:
        """The first that is not 0 (a negative one is a signal)."""
        return next(filter(None, self.codes), 0)


class Forked:
    """Processes that call `job(*arguments)`, one per rank; `environment` is added to theirs."""

    def __init__(self, job: Callable, *arguments: object, ranks: int = 1, **environment: str):
        context = multiprocessing.get_context("forkserver")
        # A server that is warm: what a run imports late is imported here
        late = "matplotlib.pyplot transformers.models.qwen3.modeling_qwen3 pyparsing.testing"
        late += " transformers.models.qwen3_moe.modeling_qwen3_moe torch.distributed.checkpoint"
        context.set_forkserver_preload(
            ["common", *MODULES.values(), *late.split(), "tests.loop.oracle"]
        )
        self.said = tempfile.TemporaryDirectory()
        if ranks > 1:
            # As torchrun does: the ranks' store outlives each of them.
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            environment |= {"MASTER_PORT": str(self.store.port)}
            environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        self.processes = []
        for rank in map(str, range(ranks)):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
            call = (Path(self.said.name), environment | own, job, arguments)
            self.processes.append(context.Process(target=child, args=call, daemon=True))
            self.processes[-1].start()

    def wait(self) -> Ended:
        """Until all have ended; where one fails the others have some seconds to notice."""
        left, patience = list(self.processes), SECONDS
        while left:
            done = multiprocessing.connection.wait([p.sentinel for p in left], patience)
            left = [p for p in left if p.sentinel not in done]
            if any(p.exitcode for p in self.processes):
                patience = 20
            if not done:
                for process in left:
                    process.kill()
        for process in self.processes:
            process.join()
        texts = [Path(self.said.name, name).read_text() for name in ("stdout", "stderr")]
        self.said.cleanup()
        return Ended([process.exitcode for process in self.processes], *texts)


def child(said: Path, environment: dict[str, str], job: Callable, arguments: tuple) -> None:
    """In the forked process: its own files for what it says, its environment, its job."""
    os.environ |= environment
    os.chdir(ROOT)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(said / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
    code = os.environ.get("PYTHONIOENCODING")
    sys.stdout = open(1, "w", encoding=code, closefd=False)
    sys.stderr = open(2, "w", encoding=code, errors="backslashreplace", closefd=False, buffering=1)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is inherited as ignored
    job(*arguments)


def forked(job: Callable, *arguments: object, ranks: int = 1, **environment: str) -> Ended:
    """Call a function of a module in a fresh process, or in each of several ranks."""
    return Forked(job, *arguments, ranks=ranks, **environment).wait()


def command(
    algorithm: str, *flags: object, at: tuple = ("", 0), ranks: int = 1, **environment: str
) -> Ended:
    """`python FILE FLAGS`, or `torchrun` with several ranks. `at` is a moment of driver.py."""
    return forked(drive, algorithm, flags, *at, ranks=ranks, **environment)


def started(*words: object, **environment: str) -> subprocess.CompletedProcess:
    """A real `python WORDS` from the repository's root: some seconds of imports."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


# What runs leave behind


def metrics(folder: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if "seconds" not in k and k != "tokens_per_s"}
        for line in lines
    ]


def tree(folder: Path) -> dict[Path, bytes | None]:
    """Everything below a folder, with the files' bytes."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def tensors(checkpoint: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a sharded checkpoint by its path: weights and optimiser moments."""
    dcp_to_torch_save(checkpoint / "shards", scratch)
    flat = {}

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            flat[prefix] = value
        elif isinstance(value, dict):
            for name, inner in value.items():
                walk(f"{prefix}/{name}", inner)

    walk("", torch.load(scratch, weights_only=False))
    return flat


def assert_same_run(one: Path, other: Path, step: int, scratch: Path) -> None:
    """The same metrics and samples and, to the bit, the same weights and moments at a step."""
    assert metrics(one) == metrics(other)
    shown = [(folder / "samples.jsonl").read_bytes() for folder in (one, other)]
    assert shown[0] == shown[1] and shown[0]
    a, b = (
        tensors(folder / f"checkpoints/step_{step:06d}", scratch / "t.pt")
        for folder in (one, other)
    )
    assert a.keys() == b.keys() and len(a) > 3 * 20  # 24 weights, two moments and a step count each
    assert all(torch.equal(a[name], b[name]) for name in a)


def refused(patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *words: object) -> str:
    """What `python -m WORDS`, run in this process, says on stderr: one line, exit code 2."""
    program = str(words[0])
    patch.chdir(ROOT)
    patch.setattr(sys, "argv", [*map(str, words)])
    patch.delitem(sys.modules, program, raising=False)  # as if nobody had imported it
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.err.count("\n") == 1 and not said.out, said
    return said.err

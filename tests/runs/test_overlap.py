"""vcpo.py --overlap: not one number changes, and no fault of the sampler's process costs a run."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import vcpo
from common.records.checkpoint import checkpoints
from common.run import Run
from common.scale import overlap

from tests.helpers import SMALL, assert_same_run, drive, forked, run_here

FLAGS = [*SMALL, "--lag", 2, "--save_every", 1, "--keep", 30]


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory):
    """Six steps in which sampling and training take turns."""
    folder = tmp_path_factory.mktemp("in_turn") / "run"
    assert run_here(vcpo.main, *FLAGS, "--steps", 6, "--run_dir", folder) == 0
    return folder


def die(sampler: int, patch: pytest.MonkeyPatch) -> None:
    os.kill(sampler, signal.SIGKILL)


def hang(sampler: int, patch: pytest.MonkeyPatch) -> None:
    os.kill(sampler, signal.SIGSTOP)
    patch.setattr(overlap, "PATIENCE", 1)


def lack_memory(sampler: int, patch: pytest.MonkeyPatch) -> None:
    """The next request is for more tokens than memory can hold."""

    def submit(self: overlap.Overlapped, prompts: list, n: int, limit: int, temperature: float):
        self._ask("generate", prompts, n, 10**12, temperature)

    patch.setattr(overlap.Overlapped, "submit", submit)


def stop(sampler: int, patch: pytest.MonkeyPatch) -> None:
    """To both, as from a terminal or from SLURM."""
    os.kill(sampler, signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (None, 0, ""),
        (stop, 0, ""),
        pytest.param(die, 1, "ended with exit code -9", marks=pytest.mark.slow),
        pytest.param(hang, 1, "has not answered for 1 s", marks=pytest.mark.slow),
        pytest.param(lack_memory, 1, "out of memory in rollout", marks=pytest.mark.slow),
    ],
)
def test_faults(fault, code, said, in_turn, tmp_path, capsys):
    """In the third step, while both are at work. The run ends, the sampler with it, and resume
    goes on to the numbers of the run in turn."""
    flags, samplers = [*FLAGS, "--steps", 6, "--run_dir", tmp_path / "run", "--overlap"], []
    due = vcpo.Stale.due

    with pytest.MonkeyPatch.context() as patch:

        def due_and_fault(self: vcpo.Stale, step: int) -> list:
            (sampler,) = multiprocessing.active_children()
            samplers.append(sampler.pid)
            if fault and step == 3:  # which is not evaluated
                fault(sampler.pid, patch)
            return due(self, step)

        patch.setattr(vcpo.Stale, "due", due_and_fault)
        assert run_here(vcpo.main, *flags) == code
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(errors) == code and said in "".join(errors)
    assert not Path(f"/proc/{samplers[0]}").exists()
    if fault:
        assert checkpoints(tmp_path / "run")
        assert run_here(vcpo.main, *flags, "--resume") == 0
    assert_same_run(in_turn, tmp_path / "run", 6, tmp_path)


def killed(flags: list, step: int) -> None:
    """One rank; at the end of a step it says which sampler it has, and the last rank is killed."""
    log = Run.log

    def log_sampler(self: Run, done: int, *given: object) -> None:
        (sampler,) = multiprocessing.active_children()
        name = f"{flags[-1]}.sampler{self.world.rank}"
        Path(name).write_text(json.dumps(sampler.pid), "utf-8")
        log(self, done, *given)

    Run.log = log_sampler
    drive("vcpo", flags, signal.SIGKILL, step)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_twenty_steps_with_a_kill_in_the_middle(ranks, tmp_path):
    """Each rank has its own sampler, and none outlives its rank."""
    flags = [*FLAGS, "--steps", 20, "--run_dir"]
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    assert set(forked(drive, "vcpo", [*flags, whole], ranks=ranks).codes) == {0}
    ended = forked(killed, ["--overlap", *flags, parts], 11, ranks=ranks)
    assert ended.codes[-1] == -9 and all(ended.codes), ended.stderr
    ended = forked(drive, "vcpo", ["--resume", "--overlap", *flags, parts], ranks=ranks)
    assert set(ended.codes) == {0}, ended.stderr
    for rank in range(ranks):
        assert not Path(f"/proc/{Path(f'{parts}.sampler{rank}').read_text()}").exists()
    assert_same_run(Path(whole), Path(parts), 20, tmp_path)

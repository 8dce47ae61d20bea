"""The run folder: one run at a time, nothing of others is touched, and damage is named."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpo
import pytest
from common.records.checkpoint import checkpoints
from common.records.resume import folder_to_resume
from common.records.files import new_folder
from common.run import Run

from tests.helpers import SMALL, assert_same_run, command, metrics, run_here, tree

slow = pytest.mark.slow


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_of_many_at_once_each_gets_its_own_folder(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(new_folder, 160 * [tmp_path / "new/run"]))
    assert len(set(made)) == len(made) == 160
    assert {path.name for path in made} == {"run", *(f"run.{i}" for i in range(2, 161))}


def test_which_folder_is_resumed(tmp_path):
    """It is the named one, if it has a checkpoint, else the newest of its name that has one."""
    name = tmp_path / "run"
    assert folder_to_resume(name, True) == name
    for folder in ("run", *(f"run.{i}" for i in range(2, 12))):
        (tmp_path / folder / "checkpoints/step_000002").mkdir(parents=True)
    (tmp_path / "run.12").mkdir()  # stopped before its first checkpoint
    assert folder_to_resume(name, True) == name
    assert folder_to_resume(name, False) == tmp_path / "run.11"
    shutil.rmtree(name / "checkpoints")
    assert folder_to_resume(name, True) == tmp_path / "run.11"


@slow
def test_a_run_goes_on_alone(tmp_path, monkeypatch):
    """Nobody else can continue it meanwhile, and another run makes a folder beside it."""
    folder, others = tmp_path / "run", []
    flags, log = [*SMALL, "--run_dir", folder, "--steps"], Run.log

    def log_and_try(self: Run, step: int, metrics: dict, minibatches: list = ()) -> None:
        log(self, step, metrics, minibatches)
        if step == 3:  # a checkpoint is there
            before = tree(folder)
            others.append(command("grpo", *flags, 4, "--resume"))
            others.append(command("grpo", *flags, 1))
            assert tree(folder) == before

    monkeypatch.setattr(Run, "log", log_and_try)
    assert run_here(grpo.main, *flags, 4) == 0
    refused, beside = others
    assert refused.returncode == 2 and f"a run is under way in {folder}" in refused.stderr
    assert beside.returncode == 0 and (tmp_path / "run.2/summary.json").exists()
    assert [line["step"] for line in metrics(folder)] == [0, 1, 2, 3, 4]


@slow
def test_what_is_not_the_runs_is_left_alone(run):
    """Of the run's own checkpoints the last three stay."""
    strays = [run / "checkpoints" / n for n in ("step_000003_old", "step_backup", "step_9")]
    for stray in strays:
        stray.mkdir()
    own = "".join(json.dumps({"prompt": "1+1=", "step": i}) + "\n" for i in range(9))
    (run / "mine.jsonl").write_text(own)
    flags = [*SMALL, "--save_every", 1, "--run_dir", run, "--resume"]
    assert run_here(grpo.main, *flags, "--steps", 7) == 0
    assert (run / "mine.jsonl").read_text() == own and all(stray.exists() for stray in strays)
    names = [path.name for path in checkpoints(run)]
    assert names == ["step_000005", "step_000006", "step_000007"]


# Damage


@slow
@pytest.mark.parametrize("damage", ["cut short", "nothing there"])
def test_a_damaged_checkpoint_is_named(damage, run, finished, capsys, tmp_path):
    """Without it the one before is taken, and the run ends as if nothing had happened."""
    shards = run / "checkpoints/step_000004/shards"
    if damage == "cut short":
        (file,) = shards.glob("*.distcp")
        file.write_bytes(file.read_bytes()[:1000])
    else:
        shutil.rmtree(shards)
    before, flags = tree(run), [*SMALL, "--steps", 4, "--run_dir", run, "--resume"]
    assert run_here(grpo.main, *flags) == 2
    assert "step_000004 does not fit --model, or is damaged" in capsys.readouterr().err
    assert tree(run) == before
    shutil.rmtree(run / "checkpoints/step_000004")
    assert run_here(grpo.main, *flags) == 0
    assert_same_run(run, finished, 4, tmp_path)


LINES = {  # what happens to the lines of steps 0 to 4
    "all lost": lambda lines: [],
    "the last one cut": lambda lines: [*lines[:4], lines[4][:-20]],
    "one missing": lambda lines: [*lines[:2], *lines[3:]],
    "one twice": lambda lines: [*lines[:3], *lines[2:]],
}


@pytest.mark.parametrize("case", LINES)
def test_resume_needs_the_metrics_of_every_step(case, run, capsys):
    """Without them the summary would compare with another step than the first."""
    path = run / "metrics.jsonl"
    path.write_text("\n".join(LINES[case](path.read_text().splitlines())))
    before = tree(run)
    assert run_here(grpo.main, *SMALL, "--steps", 5, "--run_dir", run, "--resume") == 2
    assert f"--resume: {path}" in capsys.readouterr().err and tree(run) == before


def test_a_power_loss_leaves_a_checkpoint(tmp_path, monkeypatch):
    """Metrics, files, and then their new name are on the disk before an older one goes."""
    events, fsync, rmtree = [], os.fsync, shutil.rmtree

    def synced(number: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    def removed(path: Path, **how: object) -> None:
        events.append(f"removed {path.name}")
        rmtree(path, **how)

    monkeypatch.setattr("os.fsync", synced)
    monkeypatch.setattr("shutil.rmtree", removed)
    flags = [*SMALL, "--save_every", 1, "--steps", 4, "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags) == 0
    partial = str(tmp_path / "run/checkpoints/partial")
    last = events[events.index("removed step_000004") + 1 :]
    earlier = events[: events.index("removed step_000004")][::-1]
    of_step_4 = earlier[: earlier.index("removed partial")]
    assert last.index(str(tmp_path / "run/checkpoints")) < last.index("removed step_000001")
    names = {Path(path).name for path in of_step_4 if path.startswith(partial)}
    assert {"rank0.pt", "__0_0.distcp"} <= names
    assert str(tmp_path / "run/metrics.jsonl") in earlier[len(of_step_4) :][:3]

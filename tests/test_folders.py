"""The run folder: one run at a time, nothing of others touched, damage named, full disks, what a
run says of itself."""

import contextlib
import importlib.machinery
import io
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path

import common.plumbing.checkpoint
import common.plumbing.tracking
import grpo
import pytest
import torch
from common.data import load_task
from common.distributed import BadInput, StopFlag, World
from common.plumbing.folder import as_lines, checkpoints, last_saved, locked, new_folder, read_lines
from common.plumbing.launch import parse

from tests.driver import drive
from tests.helpers import (
    ROOT,
    SECONDS,
    SMALL,
    Forked,
    assert_same_run,
    command,
    metrics,
    run_here,
    started,
)

pytestmark = pytest.mark.runs


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs flags that must end with code 2 and one line, with nothing sampled; returns that
    line."""

    def refused(*flags: object, code: int = 2) -> str:
        monkeypatch.setattr("common.rollout.HFEngine.generate", None)
        capsys.readouterr()
        assert run_here(grpo.main, *flags) == code
        said = capsys.readouterr().err
        *bar, line, end = said.split("\n")
        assert line.startswith("grpo.py: error: ") and not end, said
        assert all("step/s]" in other for other in bar), said
        return line

    return refused


def tree(folder: Path) -> dict[Path, bytes | None]:
    """Everything below a folder, with the files' bytes."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# A folder of its own


def test_a_run_goes_on_alone(tmp_path, capsys):
    """While a process lives (halted at step 2) nobody else goes on with its run; another run makes a
    folder beside it; once it is killed, --resume goes on."""
    folder = tmp_path / "run"
    flags = [*SMALL, "--steps", 4, "--run_dir", folder, "--save_every", 1]
    halted = multiprocessing.get_context("forkserver").Event()
    holder = Forked(drive, "grpo", flags, halted, 2)
    assert halted.wait(SECONDS)
    before = tree(folder)
    assert run_here(grpo.main, *flags, "--resume") == 2
    said = capsys.readouterr().err
    assert f"--resume: a run is under way in {folder}" in said and said.count("\n") == 1
    assert run_here(grpo.main, *flags, "--steps", 1) == 0
    assert (tmp_path / "run.2/summary.json").exists() and tree(folder) == before
    shutil.rmtree(tmp_path / "run.2")
    holder.processes[0].kill()
    assert holder.wait().returncode == -signal.SIGKILL
    assert run_here(grpo.main, *flags, "--resume") == 0
    assert [line["step"] for line in metrics(folder)] == [0, 1, 2, 3, 4]


def test_of_many_at_once_each_gets_its_own(tmp_path):
    made, start = [], threading.Barrier(8)

    def race() -> None:
        start.wait()
        made.extend(new_folder(tmp_path / "new/run") for _ in range(20))

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == len(made) == 160
    assert {path.name for path in made} == {"run", *(f"run.{i}" for i in range(2, 161))}


def test_the_run_that_saved_last_is_resumed(tmp_path):
    """By the clock, whatever its number; a run without a checkpoint, and another name, are none."""
    name = tmp_path / "run"
    assert last_saved(name) is None
    for age, folder in enumerate(("run", "run.3", "run.2", "run.2x", "runs")):
        (tmp_path / folder / "checkpoints/step_000002").mkdir(parents=True)
        os.utime(tmp_path / folder / "checkpoints/step_000002", (age, age))
    (tmp_path / "run.4").mkdir()
    shutil.rmtree(tmp_path / "run.2x")
    assert last_saved(name) == tmp_path / "run.2"


def test_files_that_are_not_the_runs_are_left_alone(run, tmp_path, refused):
    """The user's own JSON lines are not cut back on resume."""
    own = "".join(json.dumps({"prompt": "1+1=", "step": i}) + "\n" for i in range(9))
    (run / "mine.jsonl").write_text(own)
    assert run_here(grpo.main, *SMALL, "--steps", 5, "--run_dir", run, "--resume") == 0
    assert (run / "mine.jsonl").read_text() == own


def test_bad_input_leaves_the_earlier_run_in_its_place(run, refused):
    before = tree(run)
    refused(*SMALL, "--run_dir", run, "--clip_high", "1e39")
    assert tree(run) == before


def test_no_child_keeps_the_lock(run):
    holder = locked(run)
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False)
    with pytest.raises(BadInput, match="under way"):
        locked(run)
    holder.close()
    locked(run).close()
    child.communicate()


def test_ranks_on_a_run_under_way_say_one_line(run):
    holder = locked(run)
    ended = command("grpo", *SMALL, "--run_dir", run, "--resume", ranks=2)
    holder.close()
    assert ended.codes[0] == 2, ended.stderr
    assert ended.stderr.count("a run is under way") == 1 and "Traceback" not in ended.stderr


FOREIGN = {
    "a file": (lambda folder: folder.joinpath("x").write_text("x") and "x", "x.2"),
    "files": (lambda folder: (folder / "x/y").mkdir(parents=True) or "x", "x.2"),
    "a link": (lambda folder: (folder / "x").symlink_to("nowhere") or "x", "x.2"),
    "a long name": (lambda folder: "x" * 300, "File name too long"),
    "under a file": (lambda folder: folder.joinpath("x").write_text("x") and "x/run", "Not a dir"),
    "no such place": (lambda folder: "/proc/nowhere/run", "--run_dir /proc/nowhere/run: cannot be"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_there_stays_untouched(name, tmp_path, monkeypatch, capsys):
    make, result = FOREIGN[name]
    path = make(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    code = run_here(grpo.main, *SMALL, "--steps", 1, "--run_dir", path)
    if result == "x.2":
        assert code == 0 and (tmp_path / "x.2/summary.json").exists()
        shutil.rmtree(tmp_path / "x.2")
    else:
        said = capsys.readouterr().err
        assert code == 2 and result in said and said.count("\n") == 1
    assert tree(tmp_path) == before


def test_a_place_without_permission(tmp_path, monkeypatch, refused):
    """As root no permission is ever missing: the system call is made to say so."""

    def mkdir(self: Path, *arguments: object, **keywords: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    said = refused("--run_dir", tmp_path / "run")
    assert "cannot be used ([Errno 13] Permission denied" in said


def test_a_name_that_the_terminal_cannot_show(tmp_path):
    flags = [*SMALL, "--steps", 1, "--run_dir", tmp_path / "β"]
    done = command("grpo", *flags, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "\\u03b2" in done.stdout and (tmp_path / "β/summary.json").exists()


# Damage


def rewrite(path: Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


def shard(checkpoint: Path) -> Path:
    return next((checkpoint / "shards").glob("*.distcp"))


def middle(data: bytes) -> bytes:
    """One block of zeros, in the middle: inside some tensor."""
    return data[: len(data) // 2] + bytes(512) + data[len(data) // 2 + 512 :]


DAMAGE = {
    "rank0.pt truncated": lambda c: rewrite(c / "rank0.pt", lambda data: data[:-100]),
    "rank0.pt empty": lambda c: rewrite(c / "rank0.pt", lambda data: b""),
    "rank0.pt missing": lambda c: (c / "rank0.pt").unlink(),
    "rank0.pt partly zero": lambda c: rewrite(c / "rank0.pt", middle),
    "shards truncated": lambda c: rewrite(shard(c), lambda data: data[: len(data) // 2]),
    "shards zero": lambda c: rewrite(shard(c), lambda data: bytes(len(data))),
    "shards partly zero": lambda c: rewrite(shard(c), middle),
    "shards missing": lambda c: shard(c).unlink(),
    ".metadata missing": lambda c: (c / "shards/.metadata").unlink(),
    "empty folder": lambda c: (shutil.rmtree(c), c.mkdir()),
}


@pytest.mark.parametrize("name", [name for name in DAMAGE if "partly" not in name])
def test_a_damaged_checkpoint_is_named_and_without_it_the_one_before_taken(
    name, run, finished, capsys, tmp_path
):
    """The run then ends as if nothing had been."""
    DAMAGE[name](run / "checkpoints/step_000004")
    before, flags = tree(run), [*SMALL, "--steps", 4, "--run_dir", run, "--resume"]
    assert run_here(grpo.main, *flags) == 2
    said = capsys.readouterr().err
    assert "step_000004 does not fit --model, or is damaged (then delete it)" in said
    assert tree(run) == before
    shutil.rmtree(run / "checkpoints/step_000004")
    assert run_here(grpo.main, *flags) == 0
    assert_same_run(run, finished, 4, tmp_path)


def test_strays_are_ignored_and_kept(run):
    strays = [run / "checkpoints" / n for n in ("step_000003_old", "step_backup", "step_9")]
    for stray in strays:
        stray.mkdir()
    flags = [*SMALL, "--save_every", 1, "--run_dir", run, "--resume"]
    assert run_here(grpo.main, *flags, "--steps", 7) == 0
    assert all(stray.exists() for stray in strays)
    names = [path.name for path in checkpoints(run)]
    assert names == ["step_000005", "step_000006", "step_000007"]


def test_without_a_checkpoint_a_run_starts_anew(run, capsys):
    shutil.rmtree(run / "checkpoints")
    before = tree(run)
    assert run_here(grpo.main, *SMALL, "--steps", 1, "--run_dir", run, "--resume") == 0
    assert f"no checkpoint in {run}: starting anew" in capsys.readouterr().out
    assert tree(run) == before and (run.parent / "run.2/summary.json").exists()


def garbage(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], '{"step": 2, "rew\n', *lines[2:]]))


BROKEN = {
    "config": (
        lambda run: rewrite(run / "config.json", lambda data: data[:40]),
        "config.json: damaged",
    ),
    "metrics": (lambda run: garbage(run / "metrics.jsonl"), "metrics.jsonl:3: damaged"),
    "no object": (
        lambda run: rewrite(run / "metrics.jsonl", lambda data: b"[1]\n" + data),
        "metrics.jsonl:1: damaged",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_of_a_run_are_one_line(name, run, refused, monkeypatch, capsys):
    """For --resume, and for drawing the curves again."""
    damage, message = BROKEN[name]
    damage(run)
    before = tree(run)
    assert message in refused(*SMALL, "--steps", 5, "--run_dir", run, "--resume")
    assert tree(run) == before
    monkeypatch.setattr(sys, "argv", ["curves.py", str(run)])
    with pytest.raises(SystemExit) as stop, pytest.warns(RuntimeWarning):
        runpy.run_module("tools.curves", run_name="__main__")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and message in said and said.count("\n") == 1


def test_a_last_line_cut_short_is_dropped(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"step": 2, "a": {"b": 1}')
    assert read_lines(tmp_path / "m.jsonl") == [{"step": 1}]


# Resume


def with_data(monkeypatch, fingerprint: str, **more: object) -> None:
    def load(*arguments: object) -> object:
        return replace(load_task(*arguments), fingerprint=fingerprint, **more)

    monkeypatch.setattr(grpo, "load_task", load)


def test_resume_knows_the_data(tmp_path, monkeypatch, refused, capsys):
    """The same fingerprint goes on, and remarks are said; another one is refused before anything is
    written."""
    flags = [*SMALL, "--run_dir", tmp_path / "run"]
    with_data(monkeypatch, "abc", remarks=["two rows are the same"])
    assert run_here(grpo.main, *flags, "--steps", 1) == 0
    assert "two rows are the same\n" in capsys.readouterr().out
    assert run_here(grpo.main, *flags, "--steps", 2, "--resume") == 0
    before = tree(tmp_path)
    with_data(monkeypatch, "xyz")
    assert "has data 'abc', this run 'xyz'" in refused(*flags, "--steps", 3, "--resume")
    assert tree(tmp_path) == before


def test_resuming_a_finished_run_changes_nothing(run, capsys):
    before = tree(run)
    assert run_here(grpo.main, *SMALL, "--steps", 4, "--run_dir", run, "--resume") == 0
    assert "steps 5 to 4" in capsys.readouterr().out
    after = tree(run)
    assert after.keys() == before.keys()
    same = [path for path in before if path.name not in ("curves.png", "config.json")]
    assert all(after[path] == before[path] for path in same)


# Disks that fill


def full(*arguments: object, **keywords: object) -> None:
    raise OSError(28, "No space left on device")


def test_metrics_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    """One line of its own beside the progress bar, exit code 1; --resume goes on."""
    flags, written = [*SMALL, "--steps", 4, "--run_dir", tmp_path / "run"], []

    def sometimes(rows: list) -> str:
        written.append(1)
        return full() if len(written) == 4 else as_lines(rows)

    with monkeypatch.context() as patch:
        patch.setattr("common.plumbing.tracking.as_lines", sometimes)
        assert run_here(grpo.main, *flags) == 1
    said = capsys.readouterr().err.split("\n")
    assert said[-1] == ""
    assert said[-2].startswith("grpo.py: error: cannot write") and "No space left" in said[-2]
    assert "Traceback" not in "".join(said)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]
    assert run_here(grpo.main, *flags, "--resume") == 0


def test_a_full_disk_at_the_start(run, monkeypatch, refused):
    """One line, exit code 2; the earlier run is what it was."""
    before = tree(run)
    for more in (["--resume", "--steps", 5], ["--steps", 1]):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", full)
            said = refused(*SMALL, "--run_dir", run, *more)
            assert "cannot be used ([Errno 28] No space left" in said
        assert tree(run) == before


def test_a_summary_that_cannot_be_written(run, monkeypatch, refused):
    (run / "summary.json").unlink()
    monkeypatch.setattr("common.plumbing.tracking.draw_curves", full)
    said = refused(*SMALL, "--steps", 4, "--run_dir", run, "--resume", code=1)
    assert "cannot write the results" in said


def test_a_model_that_cannot_be_written(run, monkeypatch, refused):
    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    said = refused(*SMALL, "--steps", 4, "--run_dir", run, "--resume", "--save_hf", code=1)
    assert "/run/model ([Errno 28]" in said


# What a run says of itself


def test_a_fall_and_killed_answers_are_printed(tmp_path, monkeypatch, capsys):
    """A judge that kills an answer a step; accuracy that ends below its start."""
    accuracies = [{"greedy": 0.5, "sampled": 0.4}, {"greedy": 0.25, "sampled": 0.5}]
    monkeypatch.setattr(grpo, "evaluate", lambda *arguments: accuracies[bool(judge.killed)])

    def judge(completions: list[str], answers: list[str]) -> list[float]:
        judge.killed += 1
        return [1.0] * len(answers)

    judge.killed = 0
    with_data(monkeypatch, "", judge=judge)
    flags = [*SMALL, "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags, "--steps", 2) == 0
    said = capsys.readouterr().out
    assert "\n2 answers broke the judge's time or memory bounds" in said
    assert "WARNING: held-out accuracy ended below its start" in said


@pytest.mark.curves
def test_numbers_that_json_cannot_write_are_null(tmp_path, monkeypatch, capsys):
    """A loss of NaN: every line of metrics.jsonl is strict JSON; bar, curves and summary take
    it."""
    monkeypatch.setattr(
        grpo, "sampler_gap", lambda *a: {"sampler_kl": float("nan"), "sampler_gap": 0.0}
    )
    assert run_here(grpo.main, *SMALL, "--steps", 2, "--run_dir", tmp_path / "run") == 0
    assert [line["sampler_kl"] for line in metrics(tmp_path / "run")[1:]] == [None, None]
    assert (tmp_path / "run/curves.png").stat().st_size > 10_000
    assert json.loads(as_lines([{"a": [float("nan"), {"b": -float("inf")}], "c": 1.5}])) == {
        "a": [None, {"b": None}],
        "c": 1.5,
    }


def test_a_wandb_that_does_not_start_is_one_line(tmp_path, monkeypatch, refused):
    fake = types.ModuleType("wandb")
    fake.__spec__, fake.init = (
        importlib.machinery.ModuleSpec("wandb", None),
        lambda **keywords: full(),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert "--wandb project: does not start ([Errno 28]" in refused(
        *SMALL, "--wandb", "project", "--run_dir", tmp_path / "run"
    )

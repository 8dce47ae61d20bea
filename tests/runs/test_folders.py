"""The run folder: one run at a time, nothing of others touched, damage named, full disks, what a
run says of itself."""

import importlib.machinery
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

import grpo
import pytest
import torch
from common.data import load_task
from common.distributed import BadInput, StopFlag
from common.plumbing.folder import as_lines, checkpoints, lock, new_folder, runs_called, read_lines
from common.plumbing.launch import parse
from transformers import AutoModelForCausalLM

from tests.driver import drive
from tests.helpers import (
    SECONDS,
    SMALL,
    Forked,
    assert_same_run,
    command,
    forked,
    metrics,
    run_here,
    tensors,
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
    """While a process lives (halted at step 2) nobody else goes on with its run; another run makes
    a folder beside it; once it is killed, --resume goes on."""
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


def test_two_runs_started_at_once_have_a_folder_each(tmp_path):
    """The same name, two seeds: nothing of one is in the other."""
    flags = [*SMALL, "--steps", 2, "--run_dir", tmp_path / "run"]
    both = [Forked(drive, "grpo", [*flags, "--seed", seed]) for seed in (1, 2)]
    folders = [tmp_path / "run", tmp_path / "run.2"]
    assert [one.wait().returncode for one in both] == [0, 0]
    assert {*tmp_path.iterdir()} == {*folders}
    assert {json.loads((one / "config.json").read_text())["seed"] for one in folders} == {1, 2}
    for one in folders:
        assert [line["step"] for line in metrics(one)] == [0, 1, 2]
        assert [path.name for path in checkpoints(one)] == ["step_000002"]


def test_a_link_to_nowhere_above_the_folder_ends_in_a_line(tmp_path, capsys):
    """As a disk that is not mounted leaves it: no search for a free number without end."""
    (tmp_path / "runs").symlink_to(tmp_path / "nowhere")
    assert run_here(grpo.main, *SMALL, "--steps", 1, "--run_dir", tmp_path / "runs/x") == 2
    assert f"--run_dir {tmp_path}/runs/x: cannot be used" in capsys.readouterr().err


def test_the_runs_with_a_name_newest_first(tmp_path):
    """By its number, 10 after 9; a folder that no run made, or with another name, is none."""
    name = tmp_path / "run"
    assert runs_called(name) == []
    config = dict.fromkeys(("algorithm", "acted", "task", "seed"))
    for folder in ("run", "run.9", "run.10", "run.11", "run.12x", "runs", "old.run"):
        (tmp_path / folder).mkdir()
        if folder != "run.11":
            (tmp_path / folder / "config.json").write_text(json.dumps(config))
    assert runs_called(name) == [tmp_path / folder for folder in ("run.10", "run.9", "run")]


def test_the_second_run_is_resumed_while_the_first_is_finished(run, capsys):
    """`--resume` goes on with run.2, and with run again if its folder is named and run.2 gone."""
    flags, second = [*SMALL, "--steps", 4, "--run_dir", run], run.with_name("run.2")
    assert command("grpo", *flags, at=("log", 3)).returncode == -signal.SIGKILL
    before = tree(run)
    assert run_here(grpo.main, *flags, "--resume") == 0
    said = capsys.readouterr().out
    assert "steps 3 to 4" in said and f"results in {second}\n" in said
    assert tree(run) == before and (second / "summary.json").exists()
    shutil.rmtree(second)
    assert run_here(grpo.main, *flags, "--steps", 5, "--resume") == 0
    assert [line["step"] for line in metrics(run)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("place", [".", "./", "..", "~/x", "x/", "../link"])
@pytest.mark.parametrize("resume", [[], ["--resume", "auto"]])
def test_places_that_people_type(place, resume, tmp_path, monkeypatch):
    """A folder with something in it gets a neighbour, an empty one is used; ~ and a slash at the
    end mean what they always do; --resume then finds it under the same name."""
    made = {"~/x": "home/x", "x/": "up/here/x", "..": "up.2"}.get(place, "up/here")
    (tmp_path / "up/here").mkdir(parents=True)
    (tmp_path / "up/link").symlink_to("here")
    monkeypatch.chdir(tmp_path / "up/here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    flags = [*SMALL, "--save_every", 1, "--run_dir", place]
    assert run_here(grpo.main, *flags, "--steps", 1, *resume) == 0
    assert (tmp_path / made / "summary.json").exists()
    assert run_here(grpo.main, *flags, "--steps", 2, "--resume") == 0
    assert [path.parent for path in tmp_path.rglob("metrics.jsonl")] == [tmp_path / made]
    assert [line["step"] for line in metrics(tmp_path / made)] == [0, 1, 2]


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
    holder = lock(run)
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False)
    with pytest.raises(BadInput, match="under way"):
        lock(run)
    os.close(holder)
    os.close(lock(run))
    child.communicate()


def test_a_requeued_job_waits_for_the_lock_of_the_dead(run, monkeypatch):
    """NFS frees it after a lease: with `--resume auto` three minutes are waited for it, no more."""
    slept: list[float] = []
    holder = lock(run)
    monkeypatch.setattr("common.plumbing.folder.time.sleep", slept.append)
    with pytest.raises(BadInput, match="under way"):
        lock(run, 180)
    assert sum(slept) == 180
    monkeypatch.setattr("common.plumbing.folder.time.sleep", lambda _: os.close(holder))
    os.close(lock(run, 300))


def test_ranks_on_a_run_under_way_say_one_line(run):
    holder = lock(run)
    ended = command("grpo", *SMALL, "--run_dir", run, "--resume", ranks=2)
    os.close(holder)
    assert ended.codes[0] == 2, ended.stderr
    assert ended.stderr.count("a run is under way") == 1 and "Traceback" not in ended.stderr


FOREIGN = {
    "a file": (lambda folder: folder.joinpath("x").write_text("x") and "x", "File exists"),
    "files": (lambda folder: (folder / "x/y").mkdir(parents=True) or "x", "x.2"),
    "a link": (lambda folder: (folder / "x").symlink_to("nowhere") or "x", "File exists"),
    "no folder": (lambda folder: "/dev/null", "File exists: '/dev/null'"),
    "a long name": (lambda folder: "x" * 300, "File name too long"),
    "under a file": (
        lambda folder: folder.joinpath("x").write_text("x") and "x/run",
        "Not a directory",
    ),
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
    assert "step_000004 does not fit --model, or is damaged: then delete it, and" in said
    assert said.count("\n") == 1
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


def test_without_a_checkpoint(run, capsys):
    """--resume has nothing to go on from; `auto` starts anew, in a folder of its own."""
    shutil.rmtree(run / "checkpoints")
    before, flags = tree(run), [*SMALL, "--steps", 1, "--run_dir", run, "--resume"]
    assert run_here(grpo.main, *flags) == 2
    assert f"--resume: no checkpoint in {run}\n" in capsys.readouterr().err
    assert run_here(grpo.main, *flags, "auto") == 0
    assert f"no checkpoint of this run in {run}: starting anew" in capsys.readouterr().out
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


def test_a_hole_in_the_metrics_is_said_and_the_file_kept(run, capsys):
    """As a power loss leaves it: the checkpoint has step 4, the metrics end in the midst of it."""
    cut = (run / "metrics.jsonl").read_bytes()[:-40]
    (run / "metrics.jsonl").write_bytes(cut)
    for steps in (5, 6):  # said each time, and what is kept is what was found first
        assert run_here(grpo.main, *SMALL, "--steps", steps, "--run_dir", run, "--resume") == 0
        assert f"{run}/metrics.jsonl lacks step 4 for good" in capsys.readouterr().out
    assert (run / "metrics.jsonl.damaged").read_bytes() == cut
    assert [line["step"] for line in metrics(run)] == [0, 1, 2, 3, 5, 6]


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
    assert "has other problems, or another reward" in refused(*flags, "--steps", 3, "--resume")
    assert tree(tmp_path) == before


def test_fewer_steps_than_done(run, refused):
    before = tree(run)
    said = refused(*SMALL, "--steps", 3, "--run_dir", run, "--resume")
    assert f"--steps 3: {run} is at step 4" in said and tree(run) == before


def test_resuming_a_finished_run_changes_nothing(run, capsys):
    """But it can write the model."""
    before = tree(run)
    flags = [*SMALL, "--steps", 4, "--run_dir", run, "--resume"]
    assert run_here(grpo.main, *flags, "--save_hf") == 0
    assert "all 4 steps are done: to go on, give more --steps" in capsys.readouterr().out
    lm = AutoModelForCausalLM.from_pretrained(run / "model")
    saved = tensors(run / "checkpoints/step_000004", run.with_name("t.pt"))
    assert all(torch.equal(w, saved[f"/policy/lm.{name}"]) for name, w in lm.named_parameters())
    shutil.rmtree(run / "model")
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
        if not rows[0].keys() & {"example", "minibatch"}:  # a line of metrics.jsonl
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


# Signals


def test_hangup_stays_ignored_under_nohup():
    handlers = {number: signal.getsignal(number) for number in (1, 2, 15)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert not StopFlag().raised and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        flag = StopFlag()
        signal.raise_signal(signal.SIGHUP)
        assert flag.raised
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def interrupted(folder: Path) -> None:
    """A run that Ctrl-C reaches while the model loads."""
    grpo.load_model = lambda *arguments: signal.raise_signal(signal.SIGINT)
    drive("grpo", ["--run_dir", folder])


def test_ctrl_c_while_loading(tmp_path):
    """Dies of the signal, as the shell expects, without a traceback; nothing is written."""
    ended = forked(interrupted, tmp_path / "new/run")
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")
    assert not list(tmp_path.iterdir())


def test_a_wrong_flag_is_said_once(monkeypatch, capsys):
    """By the first rank."""
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--nope", "1"])
    said = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stop:
            parse(grpo.Args)
        said.append(capsys.readouterr().err)
        assert stop.value.code == 2
    assert "nope" in said[0] and said[0].count("\n") == 1 and not said[1]


# What a run says of itself


def test_a_fall_and_killed_answers_are_printed(tmp_path, monkeypatch, capsys):
    """A judge that kills an answer a step; accuracy that ends below its start."""
    accuracies = [{"greedy": 0.5, "sampled": 0.4}, {"greedy": 0.25, "sampled": 0.5}]
    monkeypatch.setattr(grpo, "evaluate", lambda *arguments: accuracies.pop(0))

    def judge(completions: list[str], answers: list[str]) -> list[float]:
        judge.killed += 1
        return [1.0] * len(answers)

    judge.killed = 0
    with_data(monkeypatch, "", judge=judge)
    flags = [*SMALL, "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags, "--steps", 2) == 0
    said = capsys.readouterr().out
    assert "\n2 answers broke the judge's bounds, or your reward" in said
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

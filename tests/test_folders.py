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

import common.checkpoint
import common.tracking
import grpo
import pytest
import torch
from common.data import load_task
from common.distributed import BadInput, StopFlag, World
from common.folder import LOCK, Claim, append, as_lines, read_lines, spelled_out
from common.launch import parse, without_effect

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


# One run at a time


def test_a_folder_in_use_is_refused_and_a_dead_runs_taken_over(tmp_path, capsys):
    """A live process (halted at step 2) keeps every other run out; once it is killed, the folder is
    free."""
    folder = tmp_path / "run"
    flags = [*SMALL, "--steps", 4, "--run_dir", folder]
    halted = multiprocessing.get_context("forkserver").Event()
    holder = Forked(drive, "grpo", [*flags, "--save_every", 1], halted, 2)
    assert halted.wait(SECONDS)
    before = tree(folder)
    for more in ([], ["--resume"]):
        capsys.readouterr()
        assert run_here(grpo.main, *flags, *more) == 2
        said = capsys.readouterr().err
        assert (
            f"--run_dir {folder}: another run writes there (process {holder.processes[0].pid} on "
            in said
        )
        assert said.count("\n") == 1 and tree(folder) == before
    holder.processes[0].kill()
    assert holder.wait().returncode == -signal.SIGKILL
    assert (folder / LOCK).exists()
    assert run_here(grpo.main, *flags, "--resume") == 0
    assert [line["step"] for line in metrics(folder)] == [0, 1, 2, 3, 4]
    assert not (folder / LOCK).exists()


def test_of_many_at_once_one_gets_the_folder(tmp_path):
    """Also while a holder lets go (and removes its lock file), and where the folder does not exist
    yet."""
    holders = []

    def race(folder: Path, start: threading.Barrier) -> None:
        start.wait()
        for _ in range(20):
            # The loser's folder may be unmade under it
            with contextlib.suppress(BadInput, OSError):
                claim = Claim(folder)
                holders.append(1)
                counts.append(len(holders))
                holders.pop()
                claim.release()

    for i in range(5):
        counts, start = [], threading.Barrier(8)
        threads = [
            threading.Thread(target=race, args=(tmp_path / f"new/{i}", start)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert counts and set(counts) == {1}
    assert not list(tmp_path.rglob(LOCK))


def test_a_run_whose_folder_is_replaced_stops(finished, tmp_path, monkeypatch, capsys):
    """Moved away by hand, and another run put in its place: the first one writes nothing into
    that."""
    folder, log = tmp_path / "run", common.tracking.Run.log

    def log_and_move(self: object, step: int, metrics: dict) -> None:
        log(self, step, metrics)
        if step == 1:
            folder.rename(tmp_path / "kept")
            shutil.copytree(finished, folder)

    monkeypatch.setattr(common.tracking.Run, "log", log_and_move)
    assert run_here(grpo.main, *SMALL, "--steps", 5, "--run_dir", folder) == 1
    assert "was moved or replaced under this run" in capsys.readouterr().err
    assert tree(folder).keys() == {folder / path.relative_to(finished) for path in tree(finished)}
    assert (folder / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("place", ["inner", "checkpoints/step_000099", "checkpoints/step_000002/x"])
def test_no_run_lies_inside_another(place, run, refused):
    """It would be moved, or deleted, with that."""
    before = tree(run)
    assert f"lies inside the run {run}" in refused(*SMALL, "--run_dir", run / place)
    assert tree(run) == before


def test_files_that_are_not_the_runs_are_left_alone(run, tmp_path, refused):
    """The user's own JSON lines are not cut back on resume; a lock that is a link empties
    nothing."""
    own = "".join(json.dumps({"prompt": "1+1=", "step": i}) + "\n" for i in range(9))
    (run / "mine.jsonl").write_text(own)
    assert run_here(grpo.main, *SMALL, "--steps", 5, "--run_dir", run, "--resume") == 0
    assert (run / "mine.jsonl").read_text() == own
    (tmp_path / "precious").write_text("precious")
    (run / LOCK).symlink_to(tmp_path / "precious")
    assert "cannot be used" in refused(*SMALL, "--steps", 6, "--run_dir", run, "--resume")
    assert (tmp_path / "precious").read_text() == "precious"


def test_bad_input_leaves_the_earlier_run_in_its_place(run, refused):
    before = tree(run)
    refused(*SMALL, "--run_dir", run, "--clip_high", "1e39")
    assert tree(run) == before


def test_no_child_keeps_the_lock(tmp_path):
    claim = Claim(tmp_path / "run")
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False)
    claim.release()
    Claim(tmp_path / "run").release()
    child.communicate()


def test_a_folder_moved_by_hand_leaves_the_next_ones_lock(tmp_path):
    """The run whose folder was moved away ends: the lock of the run that has the name now stays."""
    first = Claim(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    second = Claim(tmp_path / "run")
    first.release()
    with pytest.raises(BadInput, match=f"process {os.getpid()} on "):
        Claim(tmp_path / "run")
    second.release()


def test_ranks_on_a_folder_in_use_say_one_line(tmp_path):
    claim = Claim(tmp_path / "run")
    run = command("grpo", *SMALL, "--run_dir", tmp_path / "run", ranks=2)
    claim.release()
    assert run.codes == [2, 2], run.stderr
    assert run.stderr.count("another run writes there") == 1 and "Traceback" not in run.stderr


def test_a_wrong_flag_is_no_traceback_on_the_other_ranks(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--nope", "1"])
    with pytest.raises(BadInput, match="wrong flags"):
        parse(grpo.Args, first_rank=False)


# What is not a run


def files(folder: Path) -> str:
    (folder / "thesis").mkdir()
    (folder / "thesis/main.tex").write_text("x")
    return "thesis"


def a_file(folder: Path) -> str:
    (folder / "notes.txt").write_text("x")
    return "notes.txt"


def another_programs(folder: Path) -> str:
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text('{"model_type": "qwen3", "ranks": 1}')
    return "model/"


def damaged(folder: Path) -> str:
    (folder / "old").mkdir()
    (folder / "old/config.json").write_text('{"algorithm": "gr')
    return "old"


def a_list(folder: Path) -> str:
    (folder / "old").mkdir()
    (folder / "old/config.json").write_text("[1]")
    return "old"


FOREIGN = {
    "files": (files, "holds main.tex and no run"),
    "a file": (a_file, "Not a directory"),
    "another program's": (another_programs, "holds config.json and no run"),
    "damaged config": (damaged, "config.json: damaged, no JSON"),
    "a list": (a_list, "holds config.json and no run"),
    "under a file": (lambda folder: a_file(folder) + "/run", "Not a directory"),
    "long": (lambda folder: "new/" + "x" * 300, "File name too long"),
    "no such place": (
        lambda folder: "/proc/nowhere/run",
        "--run_dir /proc/nowhere/run: cannot be used",
    ),
    "current": (lambda folder: files(folder) and ".", "holds thesis and no run"),
    "parent": (lambda folder: files(folder) and "thesis/..", "holds thesis and no run"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_not_a_run_stays_untouched(name, tmp_path, monkeypatch, refused):
    """One line and exit code 2, before anything is sampled."""
    make, message = FOREIGN[name]
    path = make(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    assert message in refused(*SMALL, "--run_dir", path)
    assert tree(tmp_path) == before


def test_a_place_without_permission(tmp_path, monkeypatch, refused):
    """As root no permission is ever missing: the system call is made to say so."""

    def mkdir(self: Path, *arguments: object, **keywords: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    said = refused("--run_dir", tmp_path / "run")
    assert "cannot be used ([Errno 13] Permission denied" in said


def test_a_run_around_the_current_folder_is_not_moved(run, monkeypatch, refused):
    monkeypatch.chdir(run / "checkpoints")
    before = tree(run)
    assert "not moved from under the shell" in refused(*SMALL, "--run_dir", "..")
    assert tree(run) == before


def test_names_of_folders(tmp_path, monkeypatch):
    """An empty folder is used, also as `.`; `~` is the home; a link leads to the results, of a
    second run too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    flags = [*SMALL, "--steps", 1]
    assert run_here(grpo.main, *flags, "--run_dir", ".") == 0
    assert (tmp_path / "empty/summary.json").exists()
    assert spelled_out("~/x") == tmp_path / "x" and spelled_out("a/b/") == Path("a/b")
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    for number in (1, 2):
        assert run_here(grpo.main, *flags, "--seed", number, "--run_dir", "~/link/") == 0
        assert (tmp_path / "link").is_symlink()
        assert json.loads((tmp_path / "disk/config.json").read_text())["seed"] == number
    assert json.loads((tmp_path / "disk.1/config.json").read_text())["seed"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "disk.1", "empty", "link"]


def test_a_name_that_the_terminal_cannot_show(tmp_path):
    flags = [*SMALL, "--steps", 1, "--run_dir", tmp_path / "β"]
    done = command("grpo", *flags, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "\\u03b2" in done.stdout and (tmp_path / "β/summary.json").exists()


def test_training_after_an_evaluation_in_the_same_folder(tmp_path):
    """What tools.evaluate left there is no run, and no reason to refuse: it is moved aside."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "evaluation-tiny-arithmetic.jsonl").write_text("{}\n")
    assert run_here(grpo.main, *SMALL, "--steps", 1, "--run_dir", folder) == 0
    left = [path.name for path in (tmp_path / "run.1").iterdir()]
    assert left == ["evaluation-tiny-arithmetic.jsonl"] and (folder / "summary.json").exists()


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


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(
    name, run, finished, tmp_path, capsys
):
    """The run then ends as if nothing had been."""
    DAMAGE[name](run / "checkpoints/step_000004")
    assert run_here(grpo.main, *SMALL, "--steps", 4, "--run_dir", run, "--resume") == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "is damaged" in line]
    assert len(said) == 1
    assert "step_000004 is damaged" in said[0]
    assert "going on from step_000002" in said[0]
    assert_same_run(run, finished, 4, tmp_path)


def test_strays_are_ignored_and_kept_and_the_damaged_set_aside(run):
    """A damaged step 4 is neither picked after a save at 3, nor does it push out what is saved."""
    strays = [
        run / "checkpoints" / name
        for name in ("step_000003_old", "step_backup", "step_9", "partial2")
    ]
    for stray in strays:
        stray.mkdir()
    (run / "checkpoints/step_000099").write_text("a file")
    DAMAGE["empty folder"](run / "checkpoints/step_000004")
    flags = [*SMALL, "--save_every", 1, "--run_dir", run, "--resume"]
    assert run_here(grpo.main, *flags, "--steps", 3) == 0
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert {"step_000002", "step_000003", "damaged0_step_000004", "step_000099"} <= names
    assert "step_000004" not in names
    assert run_here(grpo.main, *flags, "--steps", 7) == 0
    assert all(stray.exists() for stray in strays)
    assert [path.name for path in common.checkpoint.checkpoints(run / "checkpoints")] == [
        "step_000005",
        "step_000006",
        "step_000007",
    ]


def test_no_whole_checkpoint(run, refused):
    for checkpoint in (run / "checkpoints").iterdir():
        DAMAGE["rank0.pt empty"](checkpoint)
    before = tree(run)
    said = refused(*SMALL, "--steps", 4, "--run_dir", run, "--resume")
    assert "no whole checkpoint in" in said
    assert "step_000002" in said
    assert "step_000004" in said
    assert tree(run) == before
    shutil.rmtree(run / "checkpoints")
    assert "no checkpoint in" in refused(*SMALL, "--steps", 4, "--run_dir", run, "--resume")


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
    "no metrics": (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl"),
    "no measurement": (
        lambda run: rewrite(run / "metrics.jsonl", lambda data: b'{"step": 1}\n{"ste\n{'),
        "metrics.jsonl",
    ),
    "no run": (lambda run: (run / "config.json").unlink(), "no run"),
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
        runpy.run_module("common.curves", run_name="__main__")
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
    assert "the file behind --task arithmetic changed" in refused(*flags, "--steps", 3, "--resume")
    assert tree(tmp_path) == before


def test_fewer_steps_than_done(run, refused):
    before = tree(run)
    assert "--steps 2: " in (said := refused(*SMALL, "--steps", 2, "--run_dir", run, "--resume"))
    assert "is at step 4 already" in said and tree(run) == before


def test_resuming_a_finished_run_changes_nothing(run, capsys):
    before = tree(run)
    assert run_here(grpo.main, *SMALL, "--steps", 4, "--run_dir", run, "--resume") == 0
    assert "all 4 steps are done" in capsys.readouterr().out
    after = tree(run)
    assert after.keys() == before.keys()
    same = [path for path in before if path.name not in ("curves.png", "config.json")]
    assert all(after[path] == before[path] for path in same)


# Disks that fill


def full(*arguments: object, **keywords: object) -> None:
    raise OSError(28, "No space left on device")


def test_rows_are_appended_whole_or_not_at_all(tmp_path, monkeypatch):
    append(tmp_path / "m.jsonl", [{"step": 1}])
    with pytest.raises(OSError, match="No space left"):
        append(Path("/dev/full"), [{"step": 1}])

    class Small(io.FileIO):
        """A write of which only a part fits."""

        def write(self, data: bytes) -> int:
            return super().write(data[:20])

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, mode, buffering: Small(self, mode))
        with pytest.raises(OSError, match="No space left"):
            append(tmp_path / "m.jsonl", [{"step": 2, "reward": 0.123456789}])
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1}\n'


def test_metrics_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    """One line of its own beside the progress bar, exit code 1; --resume goes on."""
    flags, written = [*SMALL, "--steps", 4, "--run_dir", tmp_path / "run"], []

    def sometimes(*arguments: object) -> None:
        written.append(1)
        (full if len(written) == 4 else append)(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("common.tracking.append", sometimes)
        assert run_here(grpo.main, *flags) == 1
    said = capsys.readouterr().err.split("\n")
    assert said[-1] == ""
    assert said[-2].startswith("grpo.py: error: cannot write")
    assert "No space left" in said[-2]
    assert "Traceback" not in "".join(said)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]
    assert run_here(grpo.main, *flags, "--resume") == 0


@pytest.mark.parametrize(
    "more", [["--resume", "--steps", 5], ["--steps", 1]], ids=["resume", "anew"]
)
def test_a_full_disk_at_the_start(more, run, monkeypatch, refused):
    """Nothing moved, nothing left behind, exit code 2."""
    before = tree(run.parent)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        assert "cannot be written to ([Errno 28] No space left" in refused(
            *SMALL, "--run_dir", run, *more
        )
    assert tree(run.parent) == before


def test_a_summary_that_cannot_be_written(run, monkeypatch, refused):
    (run / "summary.json").unlink()
    monkeypatch.setattr("common.tracking.draw_curves", full)
    said = refused(*SMALL, "--steps", 4, "--run_dir", run, "--resume", code=1)
    assert "cannot write the results" in said


def test_a_model_that_cannot_be_written(run, monkeypatch, refused):
    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    said = refused(*SMALL, "--steps", 4, "--run_dir", run, "--resume", "--save_hf", code=1)
    assert "/run/model ([Errno 28]" in said


# Signals


def test_hangup_stays_ignored_under_nohup():
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
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


def test_ctrl_c_while_loading(tmp_path, monkeypatch, capsys):
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    # The last would come when the folder is locked
    for moment in ("load_model", "shard", "load_checkpoint"):
        with monkeypatch.context() as patch:
            patch.setattr(grpo, moment, interrupt)
            if moment == "load_checkpoint":
                patch.setattr(grpo, "StopFlag", interrupt)
            assert run_here(grpo.main, "--run_dir", tmp_path / "new/run") == 130
        assert capsys.readouterr().err == "grpo.py: interrupted\n" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("program", ["grpo.py", "notebook.py"])
def test_ctrl_c_during_the_imports(program, tmp_path):
    """One line and death by the signal, even where a library would swallow the exception; in our
    programs only. (In the background a shell has the signal ignored: hence the handler.)"""
    main = (ROOT if program == "grpo.py" else tmp_path) / program
    died = started(
        "-c",
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.modules['__main__'].__file__ = {str(main)!r}\nimport common\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    print('alive')",
    )
    killed = (-signal.SIGINT, "", "interrupted\n")
    assert (died.returncode, died.stdout, died.stderr) == (
        killed if program == "grpo.py" else (0, "alive\n", "")
    )


# What a run says of itself

IDLE = {
    "--vllm_sleep": "with the hf engine",
    "--vllm_memory 0.5": "with the hf engine",
    "--tensor_parallel 2": "with the hf engine",
    "--vllm enforce_eager=true": "with the hf engine",
    "--rollout vllm --rollout_rows 7": "with vLLM",
    "--beta 0 --offload_reference": "without a KL term",
    "--offload_reference": "on a CPU",
    "--max_prompt_tokens 9": "with --task arithmetic",
    "--instruction x": "with --task arithmetic",
    "--answer_column x": "without a local file",
    "--task gsm8k:my.jsonl --prompt_column x": "without a local file",
    "--task reasoning_gym:chain_sum --instruction x": "with --task reasoning_gym:chain_sum",
}
ACTIVE = [
    "--task my.jsonl --prompt_column x --instruction y --max_prompt_tokens 9",
    "--rollout_rows 7",
    "--beta 0.1",
]
ACTIVE += ["--rollout vllm --vllm_sleep --vllm kv_cache_dtype=fp8"]


@pytest.mark.parametrize("words", [*IDLE, *ACTIVE])
def test_flags_without_effect_are_said(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo.py", *words.split()])
    said = list(without_effect(parse(grpo.Args), World(0, 1, torch.device("cpu"))))
    flag = [word for word in words.split() if word.startswith("--")][-1]
    assert said == ([f"{flag} has no effect {IDLE[words]}"] if words in IDLE else [])


def test_without_effect_and_a_fall_and_killed_answers_are_printed(tmp_path, monkeypatch, capsys):
    """A judge that has killed three answers since the last line; accuracy that ends below its
    start; prompts too long, once each."""
    accuracies = [{"greedy": 0.5, "sampled": 0.4}, {"greedy": 0.25, "sampled": 0.5}]
    monkeypatch.setattr(grpo, "evaluate", lambda *arguments: accuracies[bool(judge.killed)])

    def judge(completions: list[str], answers: list[str]) -> list[float]:
        judge.killed += 1
        dropped.update((2, 2 + judge.killed))
        return [1.0] * len(answers)

    judge.killed, dropped = 0, {0, 1, 2}
    with_data(monkeypatch, "", judge=judge, dropped=dropped)
    flags = [*SMALL, "--vllm_sleep", "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags, "--steps", 2) == 0
    said = capsys.readouterr().out
    assert "--vllm_sleep has no effect with the hf engine\n" in said
    assert "\n2 answers broke the judge's time or memory bounds" in said
    assert "; 3 prompts too long so far, skipped" in said
    assert "\n5 prompts were met that are too long, and skipped" in said
    assert "WARNING: held-out accuracy (greedy) ended below its start" in said
    judge.killed = 0  # a new process counts on
    assert run_here(grpo.main, *flags, "--steps", 3, "--resume") == 0
    assert [line["judge_killed"] for line in metrics(tmp_path / "run")[1:]] == [1, 2, 3]


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
    assert not list(tmp_path.iterdir())

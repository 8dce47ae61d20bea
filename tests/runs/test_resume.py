"""Killed, stopped by a signal, resumed: to the bit, and only where it is the same run."""

import json
import shutil
import signal
from pathlib import Path

import grpo
import pytest
import torch.distributed as dist

from tests.loop import formulas
from tests.helpers import (
    MORE,
    ROOT,
    RUN,
    SMALL,
    assert_same_run,
    command,
    metrics,
    module_of,
    run_here,
    started,
)

pytestmark = pytest.mark.runs


@pytest.mark.parametrize("algorithm", RUN)
def test_resume_after_a_kill_is_bit_exact(algorithm, tmp_path):
    """6 steps at once, against 6 steps with a SIGKILL after the 5th (checkpoint at 4): weights,
    moments, metrics."""
    more, main = MORE.get(algorithm, formulas.of(algorithm, "SMALL", [])), module_of(algorithm).main
    flags = [*SMALL, *more, "--steps", 6]
    assert run_here(main, *flags, "--run_dir", tmp_path / "whole") == 0
    if algorithm == "grpo":  # one with an interpreter of its own, as a user has it
        words = ["grpo", "log", 5, *flags, "--run_dir", tmp_path / "parts"]
        killed = started("tests/driver.py", *words)
    else:
        killed = command(algorithm, *flags, "--run_dir", tmp_path / "parts", at=("log", 5))
    assert killed.returncode == -signal.SIGKILL
    assert [line["step"] for line in metrics(tmp_path / "parts")][-1] == 5
    assert run_here(main, *flags, "--run_dir", tmp_path / "parts", "--resume") == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 6, tmp_path)
    assert (tmp_path / "parts/summary.json").exists()
    names = sorted(path.name for path in (tmp_path / "parts/checkpoints").iterdir())
    assert names == ["step_000002", "step_000004", "step_000006"]


def test_auto_goes_on_after_torchrun_has_restarted_the_ranks(tmp_path):
    """One command, and rank 1 killed in the middle of step 4: torchrun starts both ranks again,
    they go on from step 2, and the end is that of a run that nothing happened to."""
    flags = [*SMALL, "--steps", 5]
    ranks = "-m torch.distributed.run --standalone --nproc_per_node=2 --max_restarts=1".split()
    words = ["grpo", "lost", 7, *flags, "--resume", "auto", "--run_dir", tmp_path / "parts"]
    run = started(*ranks, "tests/driver.py", *words)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "steps 1 to 5, each" in run.stdout and "steps 3 to 5, each" in run.stdout
    assert command("grpo", *flags, "--run_dir", tmp_path / "whole", ranks=2).returncode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 5, tmp_path)


def test_auto_goes_on_if_there_is_a_checkpoint_and_starts_otherwise(tmp_path, capsys):
    """No folder, a whole checkpoint, a finished run, another run."""
    folder, flags = tmp_path / "run", [*SMALL, "--run_dir", tmp_path / "run", "--resume", "auto"]

    def said(*more: object, code: int = 0) -> str:
        assert run_here(grpo.main, *flags, *more) == code
        return "".join(capsys.readouterr())

    assert "no checkpoint of this run" in (text := said("--steps", 2)) and "steps 1 to 2" in text
    assert "steps 3 to 4" in said("--steps", 4)
    before = (folder / "metrics.jsonl").read_bytes()
    assert "all 4 steps are done" in said("--steps", 4)
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert not list(tmp_path.glob("run.*"))
    assert "steps 1 to 2" in said("--steps", 2, "--seed", 2)  # another run, in run.2
    assert "steps 3 to 4" in said("--steps", 4, "--seed", 2)
    assert "all 4 steps are done" in said("--steps", 4)
    assert [path.name for path in tmp_path.glob("run.*")] == ["run.2"]


def test_a_kill_during_the_save_leaves_the_checkpoint_before(tmp_path, finished):
    """Killed between writing and renaming the second checkpoint: the first is loaded, the run ends
    as if not killed."""
    flags = [*SMALL, "--steps", 4, "--run_dir", tmp_path / "parts"]
    assert command("grpo", *flags, at=("save", 2)).returncode == -signal.SIGKILL
    names = sorted(path.name for path in (tmp_path / "parts/checkpoints").iterdir())
    assert names == ["partial", "step_000002"]
    assert run_here(grpo.main, *flags, "--resume") == 0
    assert_same_run(finished, tmp_path / "parts", 4, tmp_path)
    assert not (tmp_path / "parts/checkpoints/partial").exists()


@pytest.mark.parametrize("moment", ["term", "int", "hup"])
def test_signals_finish_the_step_save_and_exit_0(tmp_path, moment):
    """Ctrl-C in a real `python`, where the handlers stand from its first imports on."""
    flags = [*SMALL, "--steps", 50, "--run_dir", tmp_path / "run"]
    if moment == "int":
        run = started("tests/driver.py", "grpo", moment, 3, *flags)
    else:
        run = command("grpo", *flags, at=(moment, 3))
    assert run.returncode == 0, run.stderr[-2000:]
    assert "go on with --resume" in run.stdout and (tmp_path / "run/curves.png").exists()
    last = metrics(tmp_path / "run")[-1]["step"]
    assert last <= 5 and (tmp_path / f"run/checkpoints/step_{last:06d}").exists()


def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path):
    """SIGTERM to the last of two: both save step 3 and leave; resume goes on."""
    flags = [*SMALL, "--run_dir", tmp_path / "run"]
    ended = command("grpo", *flags, "--steps", 50, at=("term", 3), ranks=2)
    assert ended.codes == [0, 0], ended.stderr
    assert ended.stdout.count("stopped after step 3: go on with --resume") == 1
    assert (tmp_path / "run/checkpoints/step_000003/rank1.pt").exists()
    assert command("grpo", *flags, "--steps", 4, "--resume", ranks=2).codes == [0, 0]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    """Without a traceback; the checkpoint before is whole, and resume goes on from it."""
    flags = [*SMALL, "--steps", 4, "--run_dir", tmp_path / "run"]
    ended = command("grpo", *flags, at=("twice", 3))
    assert ended.returncode == -signal.SIGINT and "Traceback" not in ended.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]
    assert run_here(grpo.main, *flags, "--resume") == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]


def test_the_last_checkpoints_are_kept(tmp_path):
    flags = [*SMALL, "--steps", 5, "--save_every", 1, "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags) == 0
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["step_000003", "step_000004", "step_000005"]


def test_earlier_results_stay_where_they_are(tmp_path):
    flags = [*SMALL, "--steps", 1, "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags, "--seed", 1) == run_here(grpo.main, *flags) == 0
    assert (tmp_path / "run.2/summary.json").exists() and (tmp_path / "run/summary.json").exists()


def test_resume_refuses_another_run(tmp_path, monkeypatch, capsys):
    """Another algorithm, other shapes, another set: named, and the folder stays as it was."""
    folder = tmp_path / "run"
    flags = [*SMALL, "--steps", 2, "--run_dir", tmp_path / "run", "--resume"]
    assert run_here(grpo.main, *flags[:-1]) == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def refused(*extra: object) -> str:
        capsys.readouterr()
        assert run_here(grpo.main, *flags, *extra) == 2
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        return capsys.readouterr().err

    assert "has group_size 4, not 8" in refused("--group_size", 8)
    config = json.loads((folder / "config.json").read_text())
    # The evaluation set decides which rows of a set are held back from training.
    changes = {"algorithm": "gspo", "eval_task": "math500"}
    for change, message in (
        ({name: value}, f"has {name} {value!r}, not") for name, value in changes.items()
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        before[folder / "config.json"] = (folder / "config.json").read_bytes()
        assert message in refused()
    (folder / "config.json").write_text(json.dumps(config))
    before[folder / "config.json"] = (folder / "config.json").read_bytes()
    # A model of other shapes behind the same name: here the embedded one with a narrower MLP.
    other = tmp_path / "model"
    shutil.copytree(ROOT / "common/tiny/model", other)
    resized(other)
    monkeypatch.setattr("common.plumbing.model.EMBEDDED", {"tiny": other})
    wrong = "does not fit --model, or is damaged: then delete it, and the one before it is taken"
    assert f"{wrong} (Size mismatch" in refused()
    assert not dist.is_initialized()


def resized(folder: Path) -> None:
    """Rewrite a model folder with another MLP width."""
    from transformers import AutoConfig, Qwen3ForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.intermediate_size = 96
    (folder / "model.safetensors").unlink()
    Qwen3ForCausalLM(config).save_pretrained(folder)

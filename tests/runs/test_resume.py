"""Killed, stopped by a signal, resumed: to the bit, and only if it is the same run."""

import functools
import json
import shutil
import signal
import sys
from pathlib import Path

import grpo
import pytest
from checks.files import ALGORITHMS, FIRST
from common.distributed import StopFlag

from tests.helpers import SMALL, assert_same_run, command, metrics, module_of, run_here, small
from tests.helpers import started, tree

slow = pytest.mark.slow
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node=2 --max_restarts=1".split()
LOSE_A_RANK = """
import os, signal, sys
from tests.helpers import drive
number = signal.SIGKILL if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0
drive("grpo", sys.argv[1:], number, 4)
"""


OTHERS = [pytest.param(name, marks=slow) for name in ALGORITHMS if name != FIRST]


@pytest.mark.parametrize("algorithm", [FIRST, *OTHERS])
def test_resume_after_a_kill_is_bit_exact(algorithm, tmp_path, finished):
    """A run is killed in step 4 (checkpoint at 2), and its end is that of an undisturbed run."""
    main, whole, parts = module_of(algorithm).main, tmp_path / "whole", tmp_path / "parts"
    flags = [*small(algorithm), "--steps", 4, "--run_dir"]
    if algorithm == FIRST:
        whole = finished
    else:
        assert run_here(main, *flags, whole) == 0
    killed = command(algorithm, *flags, parts, at=(signal.SIGKILL, 4))
    assert killed.returncode == -signal.SIGKILL
    assert [line["step"] for line in metrics(parts)] == [0, 1, 2, 3]
    config = json.loads((parts / "config.json").read_text())
    del config["chat"], config["weights"]  # as of a version that had no such flags
    (parts / "config.json").write_text(json.dumps(config))
    assert run_here(main, *flags, parts, "--resume") == 0
    assert_same_run(whole, parts, 4, tmp_path)
    assert (parts / "summary.json").exists()


@slow
def test_a_lost_rank_ends_the_other_and_torchrun_goes_on(tmp_path):
    """In one command rank 1 is killed in step 4, rank 0 notices, torchrun starts both again from
    step 2, and the end is that of an undisturbed run."""
    flags = [*SMALL, "--steps", 5]
    words = [*flags, "--resume", "auto", "--run_dir", tmp_path / "parts"]
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # docs/cluster.md
    run = started(*TORCHRUN, "--no-python", sys.executable, "-c", LOSE_A_RANK, *words, **fresh)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "steps 1 to 5;" in run.stdout and "steps 3 to 5;" in run.stdout
    assert command("grpo", *flags, "--run_dir", tmp_path / "whole", ranks=2).returncode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 5, tmp_path)


STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
STOPS = [STOPS.pop(), *(pytest.param(number, marks=slow) for number in STOPS)]


@pytest.mark.parametrize("number", STOPS)
def test_signals_finish_the_step_save_and_exit_0(tmp_path, number):
    flags = [*SMALL, "--steps", 50, "--run_dir", tmp_path / "run"]
    run = command("grpo", *flags, at=(number, 3))
    assert run.returncode == 0, run.stderr[-2000:]
    assert metrics(tmp_path / "run")[-1]["step"] == 3
    assert (tmp_path / "run/checkpoints/step_000003").exists()


def test_under_nohup_a_closed_terminal_ends_nothing(monkeypatch):
    handlers = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1), signal.SIG_DFL)
    handlers[signal.SIGHUP] = signal.SIG_IGN
    monkeypatch.setattr(signal, "getsignal", handlers.get)
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    StopFlag().listen()
    ignored = [number for number, handler in handlers.items() if handler == signal.SIG_IGN]
    assert ignored == [signal.SIGHUP] and signal.SIG_DFL not in handlers.values()


@slow
def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path):
    """After SIGTERM to the last of two ranks, both save step 3 and leave, and resume goes on."""
    flags = [*SMALL, "--run_dir", tmp_path / "run"]
    ended = command("grpo", *flags, "--steps", 50, at=(signal.SIGTERM, 3), ranks=2)
    assert ended.codes == [0, 0], ended.stderr
    assert (tmp_path / "run/checkpoints/step_000003/rank1.pt").exists()
    assert command("grpo", *flags, "--steps", 4, "--resume", ranks=2).codes == [0, 0]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]


OTHER_RUNS = [  # flags of the command, entries of config.json, what is said
    ([], {"algorithm": "gspo"}, "has algorithm 'gspo', not"),
    ([], {"eval_task": "math500"}, "has eval_task 'math500', not"),
    ([], {"lr": 1.0}, "has lr 1.0, not"),
    ([], {"data": "other rows"}, "has data 'other rows', not"),
    ([], {"weights": "of another model"}, "has weights 'of another model', not"),
    (["--back_to", 2, "--group_size", 2], {}, "has group_size 4, not 2"),
    (["--back_to", 2, "--seed", 2], {}, "has seed 1, not 2"),
    (["--back_to", 3], {}, "has checkpoints of 2, 4"),
]


@slow
@pytest.mark.parametrize(("more", "change", "message"), OTHER_RUNS)
def test_resume_refuses_another_run(more, change, message, tmp_path, finished, capsys):
    """The difference is named, and the folder stays as it was."""
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    before = tree(folder)
    flags = [*SMALL, "--steps", 5, "--run_dir", folder, "--resume", *more]
    assert run_here(grpo.main, *flags) == 2
    assert message in capsys.readouterr().err
    assert tree(folder) == before


def test_back_to_a_checkpoint_with_other_flags(tmp_path, finished, capsys):
    """What came later is set aside, and config.json says what changed. The same command, given
    again, does not go back a second time."""
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    old = metrics(folder)
    flags = [*SMALL, "--run_dir", folder, "--resume", "--back_to", 2, "--minibatches", 1]
    flags += ["--lr", 1e-5]
    assert run_here(grpo.main, *flags, "--steps", 4) == 0
    new = metrics(folder)
    assert new[:3] == old[:3] and new[3] != old[3] and len(new) == 5
    beside = folder / "after_2"
    assert metrics(beside) == old[3:]
    assert (beside / "step_000004").is_dir() and (beside / "samples.jsonl").is_file()
    changed = {"lr": [3e-4, 1e-5], "minibatches": [2, 1]}
    history = json.loads((folder / "config.json").read_text())["history"]
    assert history == [{"back_to": 2, "changed": changed}]
    assert run_here(grpo.main, *flags, "--steps", 5) == 0
    assert "steps 5 to 5;" in capsys.readouterr().out


# Every flag of an optimiser, of a second model's, too: another value than SMALL's
RATES = [("grpo", "--lr 1e-5"), ("grpo", "--warmup 50"), ("grpo", "--betas 0.5 0.5")]
RATES += [("grpo", "--weight_decay 10"), ("grpo", "--grad_clip 0.01")]
RATES += [("ppo", "--critic_lr 0.5"), ("goldilocks", "--teacher_lr 0.5")]


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    """Return the folder of a run of an algorithm, with a checkpoint of each step."""

    @functools.cache
    def made(algorithm: str) -> Path:
        folder = tmp_path_factory.mktemp(algorithm) / "run"
        flags = [*small(algorithm), "--save_every", 1, "--steps", 3]
        assert run_here(module_of(algorithm).main, *flags, "--run_dir", folder) == 0
        return folder

    return made


@pytest.mark.parametrize(("algorithm", "rate"), RATES)
def test_back_to_with_another_rate_acts(algorithm, rate, three_steps, tmp_path):
    """A checkpoint also holds the optimiser's settings, but the command's count."""
    old = three_steps(algorithm)
    folder = Path(shutil.copytree(old, tmp_path / "run"))
    flags = [*small(algorithm), "--steps", 3, "--run_dir", folder, "--resume"]
    flags += ["--back_to", 1, *rate.split()]
    assert run_here(module_of(algorithm).main, *flags) == 0
    before, after = ({**metrics(run)[3], "lr": 0} for run in (old, folder))
    assert before != after

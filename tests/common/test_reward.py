"""The verifiers: right answers earn, nothing else does, and no answer can hang or break the run."""

import time
from pathlib import Path

import pytest
from common.cli import RunStopped
from common.tasks.reward import Verifier, load_task_file

from tests import adapters
from tests.helpers import scored


def test_arithmetic():
    """The answer is exactly what follows the last mark."""
    for completion in ("7*8=56;56-9=47#47", "#47", "#48#47"):
        assert adapters.reward("arithmetic", completion, "47") == 1, completion
    for completion in ("47", "#147", "#471", "# 47", "#047", "#47#48", "#47;", "#", ""):
        assert adapters.reward("arithmetic", completion, "47") == 0, completion


HOSTILE = {
    "a tower": r"\boxed{9^{9^{9^{9}}}}",
    "a megabyte of digits": r"\boxed{" + "7" * 10**6 + "}",
    "NUL bytes": "\x00\\boxed{7\x00",
    "a lone surrogate": "\ud800 \\boxed{\ud800}",
    "code": r"\boxed{__import__('os').system('sleep 60')}",
    "parentheses": r"\boxed{" + "(" * 3000 + "}",
    "memory": r"\boxed{2^{40000000000}}",
    "a second line for the worker": '\\boxed{8"]\n["7", "7"]}',
}


def test_hostile_answers_cost_little_and_earn_nothing():
    """Honest answers after each are judged as always, and what broke its bounds is counted."""
    verifier, start = Verifier(workers=1, seconds=1.0, memory=2**29), time.perf_counter()
    responses, scores = [], []
    for hostile in HOSTILE.values():
        responses += [hostile, r"\boxed{7}"]
        scores += [0.0, 1.0]
    verdicts = verifier(responses, ["7"] * len(responses))
    assert scored(verdicts) == scores and any(verdict.failure for verdict in verdicts)
    assert [verdict.answer for verdict in verdicts[-2:]] == ['8"] ["7", "7"]', "7"]
    # The bound on each, and as much again for starting a worker on a busy machine
    assert time.perf_counter() - start < len(HOSTILE) * 10


@pytest.mark.slow
def test_a_verifier_that_does_not_start_ends_the_run_in_one_line(tmp_path, monkeypatch):
    """No thread waits for ever for another worker."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 7")
    python.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(python))
    verifier = Verifier(workers=1)
    for _ in range(2):
        with pytest.raises(RunStopped, match="math-verify does not start .exit code 7"):
            verifier([r"\boxed{7}"] * 3, ["7"] * 3)


# Rewards of task files

REWARD = """
import os, sys, time
bounds = {"seconds": 2, "workers": 1}
def reward(response, reference):
    if response == "loop":
        while True: pass
    if response == "raise":
        print("told")
        raise ValueError("\\x1b[2J" + "x" * 10**6)
    if response == "memory": return len("x" * 10**10)
    if response == "fork": os.fork()  # both come back
    if response == "daemon":
        if os.fork() == 0:
            os.setsid()  # out of reach: not in the worker's group
            time.sleep(1000)  # keeps the worker's pipes open
        os._exit(1)
    if response == "stray verdict":  # on another answer, in the worker's channel
        os.write(3, b'[-1, 1.0, ""]\\n')
        time.sleep(0.2)
    if response == "nan": return float("nan")
    if response == "huge": return 2**24 + 1  # float32 would make it 2**24
    return float(response == reference)
"""
FAILURES = [
    ("raise", "(mine.py:9: ValueError: "),
    ("fork", ""),
    ("stray verdict", "something else wrote into the worker's channel"),
    ("nan", "ValueError: nan is no reward"),
    ("huge", "ValueError: 16777217.0 is no reward"),
    pytest.param("loop", "out of time or memory? exit code -14", marks=pytest.mark.slow),
    pytest.param("memory", "MemoryError", marks=pytest.mark.slow),
    pytest.param("daemon", "out of time or memory", marks=pytest.mark.slow),
]


def verifier_of(folder: Path, text: str, name: str = "") -> Verifier:
    (folder / "mine.py").write_text(text)
    spec = f"{folder / 'mine.py'}{name}"
    return Verifier(spec, **getattr(load_task_file(spec), "bounds", {}))


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return verifier_of(tmp_path_factory.mktemp("hostile"), REWARD)


@pytest.mark.parametrize(("how", "expected"), FAILURES)
def test_a_reward_that_fails_costs_one_answer_at_most(how, expected, verifier, capfd):
    """The failure is counted and told once. The answers after it get their own verdicts, even if a
    fork came back with a second one."""
    verifier.told = False
    verdicts = verifier([how, "7", "8", how, "7"], ["7"] * 5)
    assert scored(verdicts) == [0.0, 1.0, 0.0, 0.0, 1.0]
    assert [bool(verdict.failure) for verdict in verdicts].count(True) == 2 * bool(expected)
    message = capfd.readouterr().err
    assert message.count("told") == 2 * (how == "raise")
    assert message.count("reward fails") == bool(expected) and expected in message
    assert len(message) < 500


def test_one_file_may_hold_several_tasks(tmp_path):
    """Each task is an object with a `reward`. One that is no function fails on every answer."""
    text = "from multiprocessing import Pool\ndef half(x): return x / 2\n"  # found by pickle
    text += "class A:\n    reward = staticmethod(lambda *both: Pool(1).map(half, [1])[0])\n"
    text += "class B: reward = 1\n"
    for name, score, failed in ((":A", 0.5, False), (":B", 0.0, True)):
        (verdict,) = verifier_of(tmp_path, text, name)(["a"], ["b"])
        assert (verdict.score, bool(verdict.failure)) == (score, failed)


@pytest.mark.slow
def test_a_run_keeps_the_reward_that_it_began_with(tmp_path):
    """If the file is edited and a worker killed, the next worker runs the old text."""
    verifier = verifier_of(tmp_path, "bounds = {'workers': 1}\ndef reward(a, b): return 0.25")
    assert scored(verifier(["a"], ["b"])) == [0.25]
    (tmp_path / "mine.py").write_text("def reward(a, b): return 1.0")
    worker = verifier.threads.submit(lambda: verifier.thread.worker).result()
    worker.process.kill()
    worker.process.wait()
    assert scored(verifier(["a"], ["b"])) == [0.25]


def test_a_worker_imports_what_the_trainer_does(tmp_path, monkeypatch):
    """That is what lies beside the reward's file, and no module of the current folder."""
    (tmp_path / "here/common").mkdir(parents=True)
    for name in ("common/__init__.py", "json.py", "socket.py"):
        (tmp_path / "here" / name).write_text("raise ImportError('a stranger ran')")
    (tmp_path / "helper.py").write_text("half = 0.5")
    monkeypatch.chdir(tmp_path / "here")
    verifier = verifier_of(tmp_path, "from helper import half\nreward = lambda *both: half")
    assert scored(verifier(["a"], ["b"])) == [0.5]

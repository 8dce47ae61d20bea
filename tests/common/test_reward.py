"""The judges: right answers earn, nothing else does, and no answer can hang or break the run."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from common.distributed import ALONE, RunStopped, setup
from common.plumbing.metrics import Means, of_judge
from common.reward import Judge, final_answer, loaded

from tests import adapters
from tests.helpers import command, forked

SECONDS = 2.0


@pytest.fixture(scope="module")
def judge():
    judge = Judge(workers=1, seconds=SECONDS, memory=2**30)
    yield judge
    judge.close()


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("7*8=56;56-9=47#47", 1),
        ("#47", 1),
        ("47", 0),  # no mark
        ("#147", 0),  # a substring is not enough
        ("#471", 0),
        ("#4 7", 0),
        ("# 47", 0),
        ("#047", 0),
        ("#47#48", 0),  # the last one counts
        ("#48#47", 1),
        ("#", 0),
        ("", 0),
        ("#47;", 0),
    ],
)
def test_arithmetic(completion, reward):
    assert adapters.reward("arithmetic", completion, "47") == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"so the answer is \boxed{\frac{1}{2}}.", "0.5", 1),
        (r"\boxed{\frac{1}{2}}", r"\dfrac12", 1),
        (r"\boxed{0.5} no, wait: \boxed{2}", "2", 1),
        (r"\boxed{x=2}", "2", 1),
        (r"\boxed{1,000}", "1000", 1),
        (r"\boxed{(1, 2)}", "(1,2)", 1),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1),
        ("The answer is 7.", "7", 1),
        ("3 + 4 = 7", "7", 1),
        ("I think 7. No: 8", "7", 0),  # without a box the last number is the answer
        (r"\boxed{2} no, wait: \boxed{3}", "2", 0),  # boxing every candidate is not answering
        (r"\boxed{1}\boxed{7}\boxed{2}", "7", 0),
        (r"\boxed{7, 8}", "7", 0),
        (r"\boxed{7 \text{ or } 8}", "7", 0),
        (r"7 is it. \boxed{}", "7", 0),
        (r"7 is it. \boxed{8", "7", 0),  # unbalanced: no answer, although a 7 stands there
        (r"\boxed{{{7}", "7", 0),
        ("", "7", 0),
        ("seventeen", "7", 0),
        ("17", "7", 0),
        ("70", "7", 0),
    ],
)
def test_math(judge, completion, answer, reward):
    assert judge([completion], [answer]) == [reward]


def test_the_question_is_not_the_answer(judge):
    """A response that repeats a question in which the answer stands earns nothing by it."""
    assert judge(
        ["You ask which of 7, 8 and 9 is a prime. That is hard to say; maybe it is 9"], ["7"]
    ) == [0.0]


HOSTILE = {
    "tower": r"\boxed{9**9**9**9}",
    "LaTeX tower": r"\boxed{9^{9^{9^{9}}}}",
    "bare tower": "9**9**9**9",
    "factorials": r"\boxed{((9!)!)!}",
    "nested fractions": r"\boxed{" + r"\frac{1}{" * 100 + "8" + "}" * 100 + "}",
    "nested roots": r"\boxed{" + r"\sqrt{" * 100 + "7" + "}" * 100 + "}",
    "a megabyte of digits": "7" * 10**6,
    "a megabyte of boxed digits": r"\boxed{" + "7" * 10**6 + "}",
    "a megabyte of boxes": r"\boxed{" * 10**5,
    "NUL bytes": "\x00\\boxed{7\x00",
    "lone surrogate": "\ud800 \\boxed{\ud800}",
    "unbalanced": r"\boxed{\frac{7}{",
    "unbalanced the other way": r"}}}\boxed{7",
    "parentheses": r"\boxed{" + "(" * 3000 + "}",
    "minus signs": r"\boxed{" + "-" * 3001 + "7}",
    "a sum without end": r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n^n}}",
    "code": r"\boxed{__import__('os').system('sleep 60')}",
    "a second line for the worker": '\\boxed{8"]\n["7", "7"]}',
    "empty": "",
    "newlines": "\n" * 1000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_cost_little_and_earn_nothing(judge, name):
    """No exception, no reward, a bounded time, and the next honest answer is judged as always."""
    start = time.perf_counter()
    assert judge([HOSTILE[name]], ["7"]) == [0.0]
    # The bound on one answer, and as much again for starting a worker on a busy machine.
    assert time.perf_counter() - start < SECONDS + 20
    assert judge([r"\boxed{7}"], ["7"]) == [1.0]


def test_broken_bounds_are_counted_and_leave_the_others_alone():
    """In one batch: a hanging answer scores 0 and is counted, its neighbours are judged, order is
    kept."""
    judge = Judge(workers=2, seconds=1.0)
    good, hanging = r"\boxed{7}", r"\boxed{9^{9^{9^{9}}}}"
    assert judge([good, hanging, good, "8", good], ["7"] * 5) == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert judge.killed == 1
    judge.close()


def test_memory_is_bounded():
    """An answer that asks for more memory than allowed is refused or killed; the worker's share
    stays bounded."""
    judge = Judge(workers=1, seconds=20.0, memory=2**28)
    assert judge([r"\boxed{2^{40000000000}}", r"\boxed{7}"], ["7", "7"]) == [0.0, 1.0]
    judge.close()


def test_a_killed_worker_is_replaced():
    """A worker that dies between two answers (out-of-memory killer) costs none."""
    judge = Judge(workers=1)
    assert judge([r"\boxed{7}"], ["7"]) == [1.0]
    worker = judge.idle.get()
    worker.process.kill()
    worker.process.wait()
    judge.idle.put(worker)
    assert judge([r"\boxed{7}"], ["7"]) == [1.0] and judge.killed == 0
    judge.close()


def test_final_answer():
    assert final_answer(r"a \boxed{1} b \boxed{\frac{1}{2}} c") == r"\boxed{\frac{1}{2}}"
    assert final_answer(r"\boxed{1} \boxed{") == ""
    assert final_answer("no box, 7") == "no box, 7"


@pytest.mark.parametrize("says", ["", "why it failed"])
def test_a_judge_that_does_not_start_ends_the_run_in_one_line(tmp_path, monkeypatch, says):
    """With the last line that it said. Nobody waits for ever for another worker."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n[ -z '{says}' ] || echo 'first\n{says}' >&2\nexit 1")
    python.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(python))
    judge, why = Judge(workers=1), says or "exit code 1: is memory left"
    for _ in range(2):
        with pytest.raises(RunStopped, match=f"the judge math-verify does not start .{why}"):
            judge([r"\boxed{7}"] * 3, ["7"] * 3)


# Rewards of yours

HOSTILE_REWARD = """
import os, sys, time
STRAY = {"stray verdict": b'[0.0, "", {}]\\n', "stray line": b"loaded model\\n"}
bounds = {"seconds": 2, "workers": 1}
def reward(response, reference):
    if response == "loop":
        while True: pass
    if response == "raise":
        raise ValueError("bad\\nnews")
    if response == "escape": raise ValueError("\\x1b[2J\\u202e" + "x" * 10**6)
    if response == "base": raise BaseException("not an Exception")
    if response == "unsayable": raise type("Mute", (Exception,), {"__str__": None})
    if response == "print":
        print('[1.0, "", {}]', flush=True) or os.write(1, b'[1.0, "", {}]\\n')
    if response == "read": return len(input())
    if response == "exit": sys.exit("enough")
    if response == "end": os._exit(3)
    if response == "memory": return len("x" * 10**10)
    if response == "fork": os.fork()  # both come back
    if response == "orphan":
        if os.fork() == 0: time.sleep(1000)  # keeps the worker's pipes open
        while True: pass
    if response == "daemon":
        if os.fork() == 0:
            os.setsid()  # out of reach: not in the worker's group
            time.sleep(1000)
        os._exit(1)
    if response in ("stray verdict", "stray line"):
        for file in range(3, 10):
            try: os.write(file, STRAY[response])
            except OSError: pass
    if response == "close": os.closerange(0, 100)
    return {"parts": {"reward": 0.5, "tests": 1, "length": 3}, "nan": float("nan"),
            "none": None, "no score": {"tests": 1}, "nan part": {"reward": 1, "x": float("nan")},
            "huge": 1e300, "maximum": {"reward": 1, "max": 1}}.get(
        response, float(response == reference))
"""
COSTS = {
    "loop": "out of time or memory? exit code -14",
    "raise": "mine.py:9: ValueError: bad)",
    "escape": "mine.py:10: ValueError: ?[2J?xxx",
    "base": "mine.py:11: BaseException: not an Exception",
    "unsayable": "mine.py:12: Mute)",
    "print": "",
    "read": "mine.py:15: EOFError",
    "exit": "mine.py:16: SystemExit: enough",
    "end": "exit code 3",
    "memory": "mine.py:18: MemoryError",
    "fork": "",
    "orphan": "out of time or memory",
    "daemon": "out of time or memory",
    "stray verdict": "something else spoke in the worker's channel",
    "stray line": "something else spoke in the worker's channel",
    "close": "out of time or memory",
    "nan": "ValueError: reward nan is no reward",
    "none": "TypeError",
    "no score": "KeyError: 'reward'",
    "nan part": "ValueError: x nan is no reward",
    "huge": "is no reward",
    "maximum": "max 1.0 is no reward",
}


def yours(folder: Path, text: str, name: str = "") -> Judge:
    (folder / "mine.py").write_text(text)
    spec = f"{folder / 'mine.py'}{name}"
    return Judge.of(spec, loaded(spec))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    judge = yours(tmp_path_factory.mktemp("hostile"), HOSTILE_REWARD)
    yield judge
    judge.close()


@pytest.mark.parametrize("how", COSTS)
def test_a_reward_of_yours_costs_one_answer_at_most(how, hostile, capfd):
    """It is counted, and named with the line of the file; the answers after it get their own
    verdicts, also where a fork came back with a second one."""
    hostile.failure, hostile.killed = "", 0
    assert hostile([how, "7", "8", "7"], ["7"] * 4) == [0.0, 1.0, 0.0, 1.0]
    assert hostile.killed == bool(COSTS[how])
    said = capfd.readouterr().err
    assert said.count("reward fails") == bool(COSTS[how]) and COSTS[how] in said
    assert len(said) < 500
    assert not hostile.parts


def test_parts_of_a_reward_are_means_over_the_answers_that_have_them(tmp_path):
    judge = yours(tmp_path, HOSTILE_REWARD)
    assert judge(["parts", "7", "parts"], ["7"] * 3) == [0.5, 1.0, 0.5]
    judge(["parts"], ["7"])  # a second call in the same step
    found = Means().add(**of_judge(judge)).reduce(ALONE)
    assert found == {"part_tests": 1.0, "part_length": 3.0, "judge_killed": 0.0}
    assert of_judge(judge) == {"judge_killed": (0, None)}
    judge.close()


def counted() -> None:
    """One of two ranks, that have met different parts; the sums are none of float32."""
    world, judge = setup(), partial(float)
    judge.spec, judge.killed = "mine.py", 1
    judge.parts = {"both": (2.0**24 + world.rank, 2)} | ({"one": (0.75, 3)} if world.rank else {})
    found = Means().add(**of_judge(judge)).reduce(world)
    mean = (2.0**25 + 1) / 4
    assert found == {"part_both": mean, "part_one": 0.25, "judge_killed": 2.0}, found


@pytest.mark.runs
def test_parts_are_exact_means_over_ranks_that_met_others():
    ended = forked(counted, ranks=2)
    assert ended.codes == [0, 0], ended.stderr


def test_one_file_may_hold_several_rewards(tmp_path):
    """A function by its name, an object with a function `reward`; what is neither is refused."""
    text = (
        "half = lambda response, reference: 0.5\nclass A:\n    reward = staticmethod(half)\nx = 1"
    )
    for name in (":half", ":A"):
        judge = yours(tmp_path, text, name)
        assert judge(["a"], ["b"]) == [0.5]
        judge.close()
    for name in ("", ":x"):
        with pytest.raises(TypeError, match="no function `reward`"):
            yours(tmp_path, text, name)
    with pytest.raises(ImportError, match="mine.py.*has no attribute 'y'"):
        yours(tmp_path, text, ":y")
    with pytest.raises(TypeError, match="'hours'"):
        yours(tmp_path, f"bounds = {{'hours': 1}}\nreward = lambda *both: 1\n{text}")


@pytest.mark.parametrize("bound", ["'seconds': 0", "'seconds': 1e999", "'memory': 2**70"])
def test_bounds_that_cannot_hold_are_refused(tmp_path, bound):
    with pytest.raises(ValueError, match="bounds: (seconds|memory) is .*, not above 0 and at most"):
        yours(tmp_path, f"bounds = {{{bound}}}\nreward = lambda *both: 1")


def test_a_worker_imports_what_the_trainer_does(tmp_path, monkeypatch):
    """Neither a `common` nor a json.py of the current folder; but what lies beside the reward's
    file, which may begin with a byte order mark."""
    (tmp_path / "here/common").mkdir(parents=True)
    for name in ("common/__init__.py", "json.py", "socket.py"):
        (tmp_path / "here" / name).write_text("raise ImportError('a stranger ran')")
    (tmp_path / "helper.py").write_text("half = 0.5")
    monkeypatch.chdir(tmp_path / "here")
    judge = yours(tmp_path, "\ufefffrom helper import half\nreward = lambda *both: half")
    assert judge(["a"], ["b"]) == [0.5]
    judge.close()


def test_what_an_answer_leaves_behind_ends_with_the_run(tmp_path):
    """A process of its own group, and the worker itself, though the run was killed."""
    started = "import os, subprocess\nbounds = {'workers': 1}\ndef reward(file, reference):\n"
    started += "    sleep = subprocess.Popen(['sleep', '777'])\n"
    started += "    open(file, 'w').write(f'{sleep.pid} {os.getpid()}')\n    return 1.0"
    ended = forked(killed_after, tmp_path, started)
    assert ended.codes == [-signal.SIGKILL], ended.stderr
    until = time.monotonic() + 20
    left = (tmp_path / "left").read_text().split()
    while any(running(pid) for pid in left) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(running(pid) for pid in left)


def killed_after(folder: Path, text: str) -> None:
    """A trainer that is killed with its judge idle."""
    assert yours(folder, text)([str(folder / "left")], [""]) == [1.0]
    os.kill(os.getpid(), signal.SIGKILL)


def running(pid: str) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and ") Z " not in state.read_text()


def test_a_run_keeps_the_reward_that_it_began_with(tmp_path):
    """You may write at the file meanwhile: a worker that is started later runs the old text."""
    judge = yours(tmp_path, "bounds = {'workers': 1}\ndef reward(a, b): return 0.25")
    assert judge(["a"], ["b"]) == [0.25]
    (tmp_path / "mine.py").write_text("def reward(a, b): return 1.0")
    worker = judge.idle.get()
    worker.process.kill()
    worker.process.wait()
    judge.idle.put(worker)
    assert judge(["a"], ["b"]) == [0.25]
    judge.close()


@pytest.mark.runs
def test_a_task_file_that_ends_the_program_on_one_rank_is_one_line(tmp_path):
    file = tmp_path / "mine.py"
    ends = "import os, sys\nif os.environ['RANK'] == '1':\n    sys.exit('no data here')\n"
    file.write_text(ends + "held_out = [('1+1=', '2')]\ntrain = lambda i: ('1+1=', '2')")
    ended = command("grpo", "--task", file, "--run_dir", tmp_path / "run", ranks=2)
    assert 2 in ended.codes and 0 not in ended.codes
    (line,) = [line for line in ended.stderr.splitlines() if "error" in line]
    assert f"--task {file}: cannot be used (mine.py:3: SystemExit: no data here)" in line
    assert "Traceback" not in ended.stderr and not (tmp_path / "run").exists()

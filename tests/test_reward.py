"""The judges: right answers earn, nothing else does, and no answer can hang or break the run."""

import time

import pytest
from common.distributed import RunStopped
from common.reward import Judge, final_answer

from tests import adapters

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
    worker.kill()
    worker.wait()
    judge.idle.put(worker)
    assert judge([r"\boxed{7}"], ["7"]) == [1.0] and judge.killed == 0
    judge.close()


def test_final_answer():
    assert final_answer(r"a \boxed{1} b \boxed{\frac{1}{2}} c") == r"\boxed{\frac{1}{2}}"
    assert final_answer(r"\boxed{1} \boxed{") == ""
    assert final_answer("no box, 7") == "no box, 7"


def test_a_judge_that_does_not_start_ends_the_run_in_one_line(monkeypatch):
    """Also for those who wait for another worker: nobody waits for ever."""
    monkeypatch.setattr("sys.executable", "/bin/false")
    judge = Judge(workers=1)
    for _ in range(2):
        with pytest.raises(RunStopped, match="the judge math-verify does not start .exit code 1"):
            judge([r"\boxed{7}"] * 3, ["7"] * 3)

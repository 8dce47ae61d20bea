"""The examples of docs/yours.md, saved under the names in their first lines, run as printed."""

import re
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import grpo
import pytest
from common.reward import Judge, loaded

from tests.helpers import ROOT, metrics, run_here
from tests.repository.test_docs import commands

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/yours.md").read_text("utf-8")
HERE = [words for name, words, _ in commands(PAGE) if name == "grpo" and "--model" not in words]


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """A folder with the page's files, the current one."""
    for text, name in re.findall(r"```python\n(# (\w+\.py)\n.*?)\n```\n", PAGE, re.DOTALL):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def judge_server(files, monkeypatch):
    """The page's stand-in for a judge model, on the loopback address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), loaded("judge_server.py").Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE", f"127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()


def run_of(folder: Path, *words: object) -> dict:
    """The last metrics of a short run."""
    small = "--steps 1 --prompts_per_step 4 --group_size 4 --eval_problems 4 --eval_samples 1"
    assert run_here(grpo.main, *words, *small.split()) == 0
    (run,) = folder.glob("runs/*")
    return metrics(run)[-1]


@pytest.mark.parametrize("words", HERE, ids=" ".join)
def test_the_examples_of_yours_run(words, files, judge_server):
    line = run_of(files, *words)
    assert line["judge_killed"] == 0 and 0 <= line["reward"] <= 1
    assert ("part_digits" in line) == ("reverse.py" in words)


def test_the_first_file_of_yours_is_a_task(files, words):
    line = run_of(files, "--task", "words.py", "--model", words, "--max_new_tokens", 4)
    assert line["judge_killed"] == 0 and line["reward"] == 0


def test_unit_tests_as_a_reward(files):
    """With fences and without; a wrong function, one that never ends, no Python; each step of a
    working is a test, a bare guess none."""
    text = (files / "unit_tests.py").read_text().replace("timeout=5", "timeout=2")
    (files / "unit_tests.py").write_text(text)
    tests = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
    right = "def add(a, b):\n    return a + b"
    answers = [right, f"So:\n```python\n{right}\n```\nDone.", right.replace("+", "*"), "I add."]
    answers += ["while True: pass"]
    judge = Judge.of("unit_tests.py", loaded("unit_tests.py"))
    assert judge(answers, [tests] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0] and judge.killed == 0
    judge.close()
    working = Judge.of("unit_tests.py:working", loaded("unit_tests.py:working"))
    answers = ["3-9=94;94+7=1#1", "3-9=6;6+7=1#1", "#1", "3-9=94;94+7=1#2"]
    assert working(answers, ["1"] * 4) == [1.0, 0.0, 0.0, 0.0] and working.killed == 0
    working.close()

"""The examples of docs/yours.md and docs/tasks/ work as printed."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpo
import pytest

from tests.common.rows import ROWS, load, write
from tests.helpers import ROOT, metrics, run_here, scored
from tests.repository.test_docs import commands

PAGE = (ROOT / "docs/yours.md").read_text("utf-8")
HERE = [words for name, words, _ in commands(PAGE) if name == "grpo" and "--model" not in words]
SMALL = "--steps 1 --prompts_per_step 4 --group_size 4 --eval_problems 4 --eval_samples 1".split()


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """Copy docs/tasks/, and enter the copy. What reads GSM8K from the hub reads gsm8k.jsonl."""
    for path in (ROOT / "docs/tasks").glob("*.py"):
        text = path.read_text("utf-8").replace('"gsm8k"', '"gsm8k:gsm8k.jsonl"')
        (tmp_path / path.name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("command", HERE, ids=" ".join)
def test_the_commands_for_a_laptop_run(command, files):
    words = [word.replace("docs/tasks/", "") for word in command]
    assert run_here(grpo.main, *words, *SMALL) == 0
    (run,) = files.glob("runs/*")
    line = metrics(run)[-1]
    assert line["judge_failed"] == 0 and 0 <= line["reward"] <= 1


def test_words():
    """This holds with the thoughts of a model that thinks, and without."""
    task = {}
    exec(re.search(r"# words.py.*?(?=```)", PAGE, re.DOTALL)[0], task)
    assert task["train"](6) == ("Write this word backwards, and nothing else: cat", "tac")
    assert task["reward"]("<think>cat, tca</think>\n Tac", "tac") == 1
    assert task["reward"]("act", "tac") == 0


def test_a_tool():
    """A call is answered, in the chat's markup. Anything else is an answer."""
    task = {}
    exec((ROOT / "docs/tasks/calls.py").read_text("utf-8"), task)
    messages, answer = task["train"](3)
    assert messages[-1]["role"] == "user" and answer.lstrip("-").isdigit()
    reply = task["reply"]("<calc>17 * 23</calc>\n", answer)
    assert "tool\n391<|im_end|>" in reply and task["reply"]("The answer is 391", answer) is None
    assert task["reward"]("tool\n391\nassistant\nThe answer is 391.", "391") == 1
    assert task["reward"]("<calc>17 * 23</calc>", "391") == 0


def test_a_dataset_with_another_reward(files):
    """Rows of a named set are judged by a reward that prefers brief answers."""
    row, answer = ROWS["gsm8k"]
    write(files / "gsm8k.jsonl", [row, row])
    task = load("brief.py")
    assert task.train(3).prompt.startswith(row["question"] + " Think step by step.")
    responses = [f"# {answer}", "so it is " * 10 + f"# {answer}", "# 7"]
    brief, long, wrong = scored(task.verifier(responses, [answer] * 3))
    assert 1 > brief > long > 0 > wrong


def test_unit_tests(files):
    tests = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
    write(files / "code.jsonl", [{"prompt": f"Add, {i}.", "tests": tests} for i in range(102)])
    task = load("unit_tests.py")
    texts = ["```python\ndef add(a, b): return a + b\n```", "def add(a, b): return 3", "add = 1"]
    assert scored(task.verifier(texts, [tests] * 3)) == [1.0, 0.5, 0.0]


class Judge(BaseHTTPRequestHandler):
    """A stand-in for a judge model. It says yes if the ends are equal."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reference, answer, _ = body["messages"][0]["content"].splitlines()
        right = answer.endswith("#" + reference.partition(": ")[2])
        reply = {"choices": [{"message": {"content": "Yes." if right else "No."}}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *words: object) -> None:
        pass


def test_a_judge_model(files, monkeypatch):
    row, answer = ROWS["gsm8k"]
    write(files / "gsm8k.jsonl", [row])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE", f"127.0.0.1:{server.server_port}")
    task = load("judge.py")
    assert scored(task.verifier([f"It is #{answer}", "It is #1"], [answer] * 2)) == [1.0, 0.0]
    server.shutdown()
    server.server_close()
    (verdict,) = task.verifier([f"It is #{answer}"], [answer])  # no server
    assert verdict.score == 0 and verdict.failure

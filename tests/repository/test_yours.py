"""The examples of docs/yours.md, saved under the names in their first lines, run as printed."""

import re
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import grpo
import pytest
from common.reward import load_task_file

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
    server = ThreadingHTTPServer(("127.0.0.1", 0), load_task_file("judge_server.py").Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("verifier", f"127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("command", HERE, ids=" ".join)
def test_the_examples_of_yours_run(command, files, judge_server):
    """The last two examples, and the first with a model that reads and writes any text."""
    small = "--steps 1 --prompts_per_step 4 --group_size 4 --eval_problems 4 --eval_samples 1"
    assert run_here(grpo.main, *command, *small.split()) == 0
    (run,) = files.glob("runs/*")
    line = metrics(run)[-1]
    assert line["judge_killed"] == 0 and 0 <= line["reward"] <= 1

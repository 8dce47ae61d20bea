"""Programs of tools/ and labs/, and the notebook, start with their smallest input and come to their
end. Programs that write a page from a table find nothing to change. A wrong call gives one line."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checks.files import VARIANTS

from tests.helpers import ROOT, forked, refused

# With the smallest input, for a copy of the repository that has finished runs
COMMANDS = """
labs.bug 1 --reveal
labs.race --table none
tools.compare runs/a runs/b
tools.evaluate runs/a --eval_problems 4 --eval_samples 1
tools.make_tiny tiny tiny-new --steps 1
tools.make_tiny tiny tiny-long --steps 1 --task arithmetic:100
tools.maintain --only marks walk losses
""".split("\n")[1:-1]
NUMBER = r"-?\d+\.\d+"


@pytest.fixture(scope="module")
def copy(tmp_path_factory, finished) -> Path:
    """Return a copy of the repository that a program may change, with two finished runs."""
    folder = tmp_path_factory.mktemp("programs") / "repository"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "mine", "venv")
    shutil.copytree(ROOT, folder, ignore=left_out)
    for name in ("a", "b"):
        shutil.copytree(finished, folder / "runs" / name)
    return folder


def start(folder: Path, words: list[str]) -> None:
    """Run `python -m WORDS` in a folder, in a process that has loaded torch but none of our
    modules."""
    ours = {path.stem for path in ROOT.iterdir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    os.chdir(folder)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_program_ends_and_finds_no_page_to_change(command, copy):
    """The walk is an exception: it measures a step again, so its numbers may differ."""
    paths = [*copy.glob("**/*.md"), copy / "labs/class.ipynb"]
    before = {path: path.read_text("utf-8") for path in paths}
    ended = forked(start, copy, command.split())
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr[-3000:]
    for path, text in before.items():
        now = path.read_text("utf-8")
        if "walk" in command:
            now, text = re.sub(NUMBER, "#", now), re.sub(NUMBER, "#", text)
        assert now == text, path


IPYTHON = """
import os, sys, types
sys.modules["IPython"] = sys.modules["IPython.display"] = types.SimpleNamespace(HTML=print)
"""


@pytest.mark.slow
def test_the_cells_of_the_notebook_run(copy):
    """Plain Python stands in for IPython, the copy for the clone. One training step is enough."""
    cells = json.loads((copy / "labs" / "class.ipynb").read_text("utf-8"))["cells"]
    program = IPYTHON + "\n".join(cell["source"] for cell in cells[3:])
    program = program.replace("--steps 40", "--steps 1").replace("python ", f"{sys.executable} ")
    program = re.sub("(?m)^!(.*)$", r'os.system("""\1""")', program)
    done = subprocess.run([sys.executable, "-c", program], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "<iframe srcdoc=" in done.stdout  # cell 4: the page of cell 3's run
    assert "TODO: advantages" in done.stdout  # cell 5: the grader has read the blank


WRONG_CALLS = """
labs.blank nope
labs.heat.mean grpo.py --runs 1
labs.fork --seeds 0
labs.race grpo.py nope
labs.race nano.py
labs.stresses grpo.py nope
tools.compare nope
tools.evaluate nowhere
tools.evaluate tiny --eval_task nosuchset
tools.make_tiny tiny docs
tools.page docs docs docs
tools.maintain --only nope
variants
variants nope
""".split("\n")[1:-1]


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_a_wrong_call_of_a_program_is_one_line(call, monkeypatch, capsys):
    refused(monkeypatch, capsys, *call.split())


def test_every_variants_loop_can_be_printed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["variants", *VARIANTS])
    monkeypatch.delitem(sys.modules, "variants.__main__", raising=False)
    runpy.run_module("variants", run_name="__main__", alter_sys=True)
    assert capsys.readouterr().out.count("\ndef main(") + 1 == len(VARIANTS)

"""The course: its notebook works from the first cell to the last, in seconds where it is asked."""

import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from labs import notebook

from tests.helpers import ROOT
from tests.test_docs import refused

PYTHON = '"{sys.executable}" '


def program(words: list[str]) -> int:
    """`python WORDS` in this process; the exit code."""
    at = 1 if words[0] == "-m" else 0
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    argv, handlers = sys.argv, {number: signal.getsignal(number) for number in numbers}
    sys.argv = words[at:]
    try:
        if at:
            sys.modules.pop(words[1], None)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            file = words[0] if Path(words[0]).exists() else str(ROOT / words[0])
            runpy.run_path(file, run_name="__main__")
        return 0
    except SystemExit as stop:
        return stop.code or 0
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)


def shell(line: str) -> int:
    """A line after `!`, its braces filled in; the exit code."""
    if line.startswith(PYTHON):
        return program(shlex.split(line.removeprefix(PYTHON), comments=True))
    line, environment = line.format(sys=sys), os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(line, shell=True, env=environment).returncode


@pytest.mark.curves
def test_every_cell_works_in_its_order(tmp_path, monkeypatch):
    """With the first cell's quick flags; the exercise is solved once its file is there."""
    real, shown, commands = subprocess.run, [], 0

    def here(words: list | str, **options: object) -> subprocess.CompletedProcess:
        """Programs that a program starts are run in this process, too."""
        if words[0] != sys.executable:
            return real(words, **options)
        return subprocess.CompletedProcess(words, program(words[1:]))

    monkeypatch.setattr(subprocess, "run", here)
    monkeypatch.chdir(tmp_path)
    made = notebook.notebook(notebook.PAGE.read_text(), tmp_path, tmp_path / "runs" / "labs")
    first, *cells = ["".join(c["source"]) for c in made["cells"] if c["cell_type"] == "code"]
    display, names = ModuleType("IPython.display"), {}
    display.Image = lambda path: shown.append(Path(path).stat().st_size)
    with monkeypatch.context() as only_now:  # matplotlib asks the real one for more
        only_now.setitem(sys.modules, "IPython", ModuleType("IPython"))
        only_now.setitem(sys.modules, "IPython.display", display)
        exec(first.replace("# QUICK, STEPS", "QUICK, STEPS"), names)
    assert names["QUICK"] == "--quick"
    for line in "\n".join(cells).splitlines():
        if not line.startswith("!"):
            exec(line, names)
            continue
        line = line[1:].replace("{QUICK}", names["QUICK"]).replace("{STEPS}", names["STEPS"])
        assert shell(line) == 0, line
        commands += 1
        exercise = Path("mine/grpo.py")
        if exercise.exists() and "NotImplementedError" in exercise.read_text():
            exercise.write_text((ROOT / "grpo.py").read_text())
    assert commands >= 10 and len(shown) >= 5 and min(shown) > 10_000


def test_the_notebook_is_the_page(tmp_path, monkeypatch):
    """Nothing of the text is lost, every command is in a cell, and links lead somewhere."""
    file = tmp_path / "a" / "course.ipynb"
    monkeypatch.setattr(sys, "argv", ["notebook", str(file)])
    runpy.run_path(str(ROOT / "labs/notebook.py"), run_name="__main__")
    made, page = json.loads(file.read_text()), notebook.PAGE.read_text()
    assert made["nbformat"] == 4 and {"metadata", "nbformat_minor"} <= set(made)
    text = "\n".join("".join(c["source"]) for c in made["cells"] if c["cell_type"] == "markdown")
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (file.parent / link).exists(), link
    kept = re.sub(r"```bash.*?```", "", re.sub(r"\]\(.*?\)", "", page), flags=re.DOTALL).split()
    assert re.sub(r"\]\(.*?\)", "", text).split() == kept
    code = "\n".join("".join(c["source"]) for c in made["cells"] if c["cell_type"] == "code")
    for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL):
        for line in block.splitlines():
            assert re.sub(r"\bpython ", PYTHON, line) in code, line


def test_another_name_is_refused(monkeypatch, capsys, tmp_path):
    refused(monkeypatch, capsys, "labs.notebook", tmp_path / "course.txt")

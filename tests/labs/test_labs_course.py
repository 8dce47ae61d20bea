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

import numpy as np
import pytest
from labs import answers, notebook

from tests.helpers import ROOT
from tests.repository.test_docs import refused

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
def test_every_cell_works_in_its_order(tmp_path, monkeypatch, capsys):
    """With the first cell's short runs; the exercise is solved once its file is there."""
    real, shown, commands = subprocess.run, [], 0

    def here(words: list | str, **options: object) -> subprocess.CompletedProcess:
        """Programs that a program starts are run in this process, too."""
        if words[0] != sys.executable:
            return real(words, **options)
        return subprocess.CompletedProcess(words, program(words[1:]))

    monkeypatch.setattr(subprocess, "run", here)
    (tmp_path / "labs").mkdir()
    (tmp_path / "labs/course.md").touch()  # by which the first cell knows the folder
    (tmp_path / "runs/labs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "runs/labs")
    made = notebook.notebook(notebook.PAGE.read_text(encoding="utf-8"), tmp_path / "runs/labs")
    first, *cells = ["".join(c["source"]) for c in made["cells"] if c["cell_type"] == "code"]
    display, names = ModuleType("IPython.display"), {}
    display.Image = lambda path: shown.append(Path(path).stat().st_size)
    with monkeypatch.context() as only_now:  # matplotlib asks the real one for more
        only_now.setitem(sys.modules, "IPython", ModuleType("IPython"))
        only_now.setitem(sys.modules, "IPython.display", display)
        only_now.setitem(os.environ, "TQDM_MININTERVAL", "")  # and puts back what the cell sets
        only_now.setitem(os.environ, "TQDM_MAXINTERVAL", "")
        exec(first.replace("# SMOKE, STEPS", "SMOKE, STEPS"), names)
    assert names["SMOKE"] == "--smoke" and Path.cwd() == tmp_path
    for line in "\n".join(cells).splitlines():
        if not line.startswith("!"):
            exec(line, names)
            continue
        line = line[1:].replace("--seeds 5", "--seeds 1")  # the time; toys are never shortened
        line = line.replace("{SMOKE}", names["SMOKE"]).replace("{STEPS}", names["STEPS"])
        assert shell(line) == 0, line
        commands += 1
        exercise = Path("mine/grpo.py")
        if exercise.exists() and "NotImplementedError" in exercise.read_text():
            exercise.write_text((ROOT / "grpo.py").read_text())
    assert commands >= 10 and len(shown) >= 5 and min(shown) > 10_000
    assert capsys.readouterr().out.count("Smoke test: shows nothing\n") >= 3  # runs, not toys


@pytest.mark.parametrize("flags", [[], ["--teacher"]])
def test_the_notebook_is_the_page(flags, tmp_path, monkeypatch):
    """Nothing of the text is lost but the teacher's notes, every command is in a cell, and links
    lead somewhere."""
    file = tmp_path / "a" / "course.ipynb"
    monkeypatch.setattr(sys, "argv", ["notebook", str(file), *flags])
    runpy.run_path(str(ROOT / "labs/notebook.py"), run_name="__main__")
    made, page = json.loads(file.read_text()), notebook.PAGE.read_text()
    page = notebook.FOR_TEACHERS.sub(r"\1" if flags else "", page)
    assert made["nbformat"] == 4 and {"metadata", "nbformat_minor"} <= set(made)
    text = "\n".join("".join(c["source"]) for c in made["cells"] if c["cell_type"] == "markdown")
    assert ("answers.md" in text) == ("## Teacher's notes" in text) == bool(flags)
    for link, heading in re.findall(r"\]\((?!http)([^)#]*)(#[^)]+)?", text):
        assert (file.parent / link).exists() if link else heading == "#teachers-notes", link
    kept = re.sub(r"```bash.*?```", "", re.sub(r"\]\(.*?\)", "", page), flags=re.DOTALL).split()
    assert re.sub(r"\]\(.*?\)", "", text).split() == kept
    code = "\n".join("".join(c["source"]) for c in made["cells"] if c["cell_type"] == "code")
    for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL):
        for line in block.splitlines():
            assert re.sub(r"\bpython ", PYTHON, line) in code, line


def test_another_name_is_refused(monkeypatch, capsys, tmp_path):
    refused(monkeypatch, capsys, "labs.notebook", tmp_path / "course.txt")


def test_a_notebook_that_is_there_is_not_written_over(monkeypatch, capsys, tmp_path):
    """Untouched it is the same; with a word in it, it is somebody's."""
    file = tmp_path / "course.ipynb"
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["notebook", str(file)])
        notebook.main()
    assert capsys.readouterr().out == f"{file}\n" * 2
    file.write_text("two hours of answers")
    assert "somebody's work" in refused(monkeypatch, capsys, "labs.notebook", file)
    assert file.read_text() == "two hours of answers"


def test_the_notebook_names_no_folder_of_the_machine_that_made_it():
    """It is handed out; outside a checkout its first cell says so."""
    made = notebook.notebook(notebook.PAGE.read_text(encoding="utf-8"), Path("runs/labs").resolve())
    assert str(ROOT) not in json.dumps(made)
    find = notebook.FIRST.split("\nhere = ")[1].split("os.chdir")[0]
    with pytest.raises(AssertionError, match="no repository above"):
        exec("from pathlib import Path\nhere = " + find.replace("Path.cwd()", "Path('/')"), {})


def questions(page: str) -> list[list[str]]:
    """The boxes of a page: of every question, what may be ticked."""
    blocks = re.findall(r"(?:^- \[ \] .*\n(?:(?!- |\n).*\n)*)+", page, re.MULTILINE)
    return [
        [" ".join(box.split()) for box in re.split(r"^- \[ \] ", block, flags=re.MULTILINE)[1:]]
        for block in blocks
    ]


def ticked(text: str) -> list[str]:
    """The boxes that the key ticks: what is fat at the head of a numbered line."""
    return [" ".join(box.split()) for box in re.findall(r"^\d\. \*\*(.*?)\*\*", text, re.M | re.S)]


KEY = (ROOT / "labs/answers.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "labs").glob("[a-z]*.md"))
PAGES = [page for page in PAGES if page.stem not in ("answers", "course", "course-answers")]


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_key_ticks_one_box_of_every_question(page):
    """In the page's order and words. (test_programs.py: its numbers are those of the tables.)"""
    section = KEY.split(f"\n## {page.stem}\n")[1].split("\n## ")[0]
    asked, told = questions(page.read_text(encoding="utf-8")), ticked(section)
    assert len(asked) == len(told) >= 1
    for boxes, box in zip(asked, told):
        assert box in boxes
    assert f"<!--numbers: {page.stem}-->" in section


def test_the_key_answers_the_course():
    """Every box of the worksheet that is right stands in it, fat."""
    course = (ROOT / "labs/course.md").read_text(encoding="utf-8")
    key = (ROOT / "labs/course-answers.md").read_text(encoding="utf-8")
    told = " ".join(key.split("\n## ")[0].split())
    for boxes in questions(course):
        assert sum(f"**{box}**" in told for box in boxes) == 1, boxes
    bugs = re.findall(r"\d+", re.search(r"another number of ([\d, and]+)\.", course)[1])
    assert len(bugs) >= 4 and all(f"\n| {number} | " in key for number in bugs)
    for name in ("sampler_logprobs", "rank_advantages", "accumulate", "ess_ratio", "pass_at_k"):
        assert f"| `{name}` |" in key


def test_what_one_seed_may_give():
    """Half of the range of five seeds at both ends, an eighth of twenty's; a share stays one."""
    assert answers.tolerance([2.0, 3.0, 4.0, 4.0, 4.0]) == (1.0, 5.0)
    assert answers.tolerance([10.0] * 19 + [18.0]) == (9.0, 19.0)
    assert answers.tolerance([0.5, 0.6, 0.7, 0.8, 0.9]) == pytest.approx((0.3, 1.0))
    assert answers.tolerance([3.0, np.inf]) == (3.0, np.inf)
    assert answers.answer(["0.41"] * 4 + ["0.45"], "0.41 (0.41–0.45)") == "0.41 (0.39 to 0.47)"
    assert answers.answer(["2.1 · 10⁻³"] * 5, "2.1 · 10⁻³") == "2.1 · 10⁻³"
    assert answers.answer(["1 of 1", "0 of 1"], "1 of 2") == "1 of 2"
    assert answers.answer(["–", "–"], "–") == "–"


def test_the_key_says_how_often_its_brackets_hold():
    """Of five seeds of twenty, chosen at random: the others of the small labs' tables, 9 in 10."""
    random, held = np.random.default_rng(0), []
    for name in ("length", "fork", "precision"):
        table = json.loads((ROOT / "labs/tables" / f"{name}.json").read_text(encoding="utf-8"))
        for runs in table["results"].values():
            for column in [key for key, value in runs[0].items() if isinstance(value, float)]:
                values = np.array([run[column] for run in runs])
                for _ in range(20 if np.ptp(values) else 0):
                    order = random.permutation(values)
                    low, high = answers.tolerance(order[:5].tolist())
                    held += [low <= value <= high for value in order[5:]]
    assert len(held) > 1000 and 0.85 < np.mean(held) < 0.99

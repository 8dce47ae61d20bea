"""Every program of tools/ and labs/ starts, with its smallest input, and comes to its end; those
that write a page from a table find nothing to change. A wrong call is one line."""

import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, forked, refused

# With the smallest input, for a copy of the repository that has finished runs
COMMANDS = """
labs.blank grpo
labs.bug 1 --reveal
labs.grade grpo.py
labs.race --redraw
tools.maintain.bench tiny --side ours --size 4 2 8
tools.compare runs/a runs/b
tools.compare --sheet sheet.png runs/a runs/b
tools.evaluate runs/a --eval_problems 4 --eval_samples 1
tools.maintain.make_tiny tiny tiny-new --steps 1
tools.maintain.marks
tools.memory --cards
tools.page runs/a
tools.reader
tools.maintain.results runs/a
tools.maintain.results --ranges runs/a
tools.maintain.spread --dry
tools.maintain.walk
tools.maintain.weights
""".split("\n")[1:-1]
NOT_HERE = {"tools.make_smollm2": "a model from the network"}
NUMBER = r"-?\d+\.\d+"


def test_every_program_has_its_line():
    programs = set()
    for path in [*ROOT.glob("tools/**/*.py"), *ROOT.glob("labs/*.py")]:
        if '__name__ == "__main__"' in path.read_text("utf-8"):
            programs.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    programs.add("labs.race")  # the other labs: tests/labs
    assert programs == {command.split()[0] for command in COMMANDS} | NOT_HERE.keys()


@pytest.fixture(scope="module")
def copy(tmp_path_factory, finished) -> Path:
    """The repository as a program may change it, with two finished runs."""
    folder = tmp_path_factory.mktemp("programs") / "repository"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "mine", "venv")
    shutil.copytree(ROOT, folder, ignore=left_out)
    (folder / ".git").symlink_to(ROOT / ".git")  # read by tools.maintain.spread
    for name in ("a", "b"):
        shutil.copytree(finished, folder / "runs" / name)
    return folder


def start(folder: Path, words: list[str]) -> None:
    """`python -m WORDS` in a folder, in a process that has loaded torch but none of our
    modules."""
    ours = {path.stem for path in ROOT.iterdir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    os.chdir(folder)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def pages(folder: Path) -> dict[Path, str]:
    found = [*folder.glob("*.md"), *folder.glob("docs/**/*.md"), *folder.glob("labs/**/*.md")]
    return {path: path.read_text("utf-8") for path in found}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_program_ends_and_finds_no_page_to_change(command, copy):
    """The walk measures a step again: its numbers may differ in their last digit."""
    before = pages(copy)
    ended = forked(start, copy, command.split())
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr[-3000:]
    for path, text in before.items():
        now = path.read_text("utf-8")
        if command != "tools.maintain.walk":
            assert now == text, path
        assert re.sub(NUMBER, "#", now) == re.sub(NUMBER, "#", text), path
        for one, other in zip(re.findall(NUMBER, now), re.findall(NUMBER, text)):
            last = 0.1 ** len(other.split(".")[1])
            assert abs(float(one) - float(other)) < 1.5 * last, (path, other)


WRONG_CALLS = """
labs.blank nope
labs.fork --seeds 0
tools.compare nope
tools.evaluate nowhere
tools.evaluate tiny --eval_task nosuchset
tools.maintain.make_tiny tiny docs
tools.memory --model tiny --gpus 12
tools.page docs docs docs
tools.reader grpo --out none/reader.html
tools.maintain.results none
tools.maintain.spread --dry nosuchcommit
""".split("\n")[1:-1]


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_a_wrong_call_of_a_program_is_one_line(call, monkeypatch, capsys):
    refused(monkeypatch, capsys, *call.split())

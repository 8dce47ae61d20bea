"""The promises of the pages: commands would start, links and pointers lead somewhere."""

import ast
import importlib
import importlib.util
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import launch
from common.distributed import World
from labs import blank, bug

from checks.files import ALGORITHMS, MODULES, PATHS
from tests.helpers import ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("labs/**/*.md")]
PAGES += ROOT.glob("variants/*.md")
PROGRAMS = [*PATHS.values(), *ROOT.glob("tools/**/*.py")]  # their headers print commands


def name_of_path(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Commands


def commands(text: str) -> list[tuple[str, list[str], int]]:
    """(algorithm or program, words, ranks) of every torchrun or python command for an algorithm
    file or tools.evaluate, on a line of its own or in backticks."""
    text = re.sub(r"`((?:torchrun|python) [^`\n]+)`", r"\n\1\n", text.replace("\\\n", " "))
    found = []
    for line in map(str.strip, text.splitlines()):
        program = re.match(r"(?:torchrun|python) .*?(?:(\w+)\.py|-m (?:variants\.)?([\w.]+))", line)
        name = program and (program[1] or program[2])
        if name in (*ALGORITHMS, "tools.evaluate"):
            words = shlex.split(line[program.end() :], comments=True)
            sizes = re.findall(r"--(?:nnodes|nproc_per_node)=(\d+)", program[0])
            found.append((name, words, math.prod(map(int, sizes))))
    return found


@pytest.mark.parametrize("path", PAGES + PROGRAMS, ids=name_of_path)
def test_every_printed_command_would_start(path, monkeypatch):
    """Its flags exist, and the launcher's own check takes them at its number of ranks. Of a command
    with `...` only a part is printed, whose flags must exist."""
    text = path.read_text("utf-8")
    header = ast.get_docstring(ast.parse(text)) or "" if path.suffix == ".py" else text
    monkeypatch.setattr(launch, "parameters_of", lambda model: 10**9)  # asks no hub
    for name, words, ranks in commands(header):
        flags = [word for word in words if word != "..."]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
        args = launch.parse(importlib.import_module(MODULES.get(name, name)).Args)
        if name in ALGORITHMS and flags == words:
            args.rollout = "vllm"  # so that --tensor_parallel is looked at
            launch.check(args, World(0, ranks, torch.device("cpu")))
            launch.check_defaults(args, sys.argv)


@pytest.mark.parametrize("path", PAGES, ids=name_of_path)
def test_every_program_of_a_page_exists(path):
    text = path.read_text("utf-8")
    for program, word in re.findall(r"-m ((?:tools|labs|tests)[.\w]+)(?: (\w+))?", text):
        if program.endswith(".NAME"):
            continue
        assert importlib.util.find_spec(program), program
        if program == "labs.bug" and word.isdigit():
            bug.damaged(bug.BUGS[int(word) - 1])
        if program == "labs.blank" and word and word != "NAME":
            blank.blank(word)


# Links and pointers


def headings(text: str) -> list[str]:
    """The anchors that GitHub gives to a page's headings."""
    found = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found]


@pytest.mark.parametrize("path", PAGES, ids=name_of_path)
def test_links_lead_somewhere(path):
    """To files, and to headings that they have."""
    for link, heading in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", path.read_text()):
        target = path.parent / link if link else path
        assert target.exists(), link
        assert not heading or heading in headings(target.read_text()), (link, heading)


def definitions(source: str) -> set[str]:
    """Functions, classes, `Class.method`, and the flags among the fields of Args or Flags."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(part, ast.FunctionDef):
                found.add(f"{node.name}.{part.name}")
            elif isinstance(part, ast.AnnAssign) and node.name in ("Args", "Flags"):
                found.add(f"--{part.target.id}")
    return found


@pytest.mark.parametrize("path", PAGES, ids=name_of_path)
def test_every_pointer_names_a_definition_that_exists(path):
    """As `grpo.py: policy_loss` or `grpo.py: --beta`."""
    for file, name in re.findall(r"`([\w/]+\.py): ([\w.-]+)`", path.read_text("utf-8")):
        assert name in definitions((ROOT / file).read_text("utf-8")), (file, name)


# Leftovers of a merge


def test_no_tracked_file_has_a_conflict_marker():
    words = ["git", "grep", "--line-number", "-I", "-E", "^(<<<<<<<|>>>>>>>|\\|{7}|={7}$)"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (1, "")  # 1: no such line

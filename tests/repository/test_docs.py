"""The promises of the pages: commands would start, links and pointers lead somewhere, every metric
is explained, and the code to write from memory computes what the files do."""

import ast
import importlib
import importlib.util
import math
import re
import shlex
import sys
from pathlib import Path

import grpo
import pytest
import torch
from common import launch
from common.distributed import World
from labs import blank, bug
from torch import Tensor
from variants import ppo

from checks import no_kl, terms
from checks.files import ALGORITHMS, MODULES, PATHS
from tests.helpers import ROOT, metrics, module_of

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
    for program, word in re.findall(r"-m ((?:tools|labs)[.\w]+)(?: (\w+))?", path.read_text()):
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


# Metrics


def test_every_metric_is_explained(finished):
    """What a run logs, and what a file counts of its own mechanism, is in docs/metrics.md, or for a
    variant in variants/README.md."""
    pages = [ROOT / "docs/metrics.md", ROOT / "variants/README.md"]
    table = "\n".join(page.read_text("utf-8") for page in pages).splitlines()
    rows = [row.split("|")[1] for row in table if row.startswith("| `")]
    explained = set(re.findall(r"`([a-z_*0-9]+)`", " ".join(rows)))
    logged = {name for line in metrics(finished) for name in line} - {"step"}
    for algorithm in ALGORITHMS:
        logged |= module_of(algorithm).ACTED.keys()
    assert logged <= explained, logged - explained


# Code to write from memory


def code(start: str) -> dict:
    """What the block of code in docs/questions.md that begins so defines."""
    page = (ROOT / "docs/questions.md").read_text("utf-8")
    block = re.search(rf"```python\n({re.escape(start)}.+?)```", page, re.DOTALL)[1]
    defined: dict = {"torch": torch}
    exec(block, defined)
    return defined


def same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def test_grpo_from_memory():
    """Question 72's code is grpo.py's."""
    written = code("def advantages")
    draw = iter(torch.randn(6, 8, 5, generator=torch.Generator().manual_seed(0)).double())
    rewards = torch.cat([(next(draw) > 0).double(), torch.full((1, 5), 0.7)])
    assert same(written["advantages"](rewards), grpo.advantages(rewards))
    assert written["advantages"](rewards)[-1].eq(0).all()
    mask = (torch.arange(5) < torch.tensor([5, 3, 1, 4, 5, 2, 1, 5])[:, None]).double()
    old_logp, A = next(draw), next(draw)[:, 0]
    logp, ref_logp = old_logp + 0.3 * next(draw), old_logp + 0.3 * next(draw)
    policies = {"logp": logp, "old_logp": old_logp, "ref_logp": ref_logp}
    loss, count = written["policy_loss"](*policies.values(), A, mask)
    real, real_count, _ = terms(grpo, grpo.Args(beta=0.01), **policies, advantages=A, mask=mask)
    assert same(loss, real) and count == real_count


def test_ppo_from_memory():
    """Question 75's code is variants/ppo.py's."""
    written = code("def gae")
    draw = iter(torch.randn(8, 3, 5, generator=torch.Generator().manual_seed(0)).double())
    mask = (torch.arange(5) < torch.tensor([[5], [3], [1]])).double()
    values, rewards = next(draw) * mask, next(draw) * mask
    A, target = written["gae"](rewards, values, mask, 0.9, 0.8)
    for found, real in zip((A, target), ppo.advantages(rewards, values, mask, 0.9, 0.8)):
        assert same(found, real)
    old_logp, V = next(draw), values + next(draw)
    logp = old_logp + 0.3 * next(draw)
    policy, value = written["ppo"](logp, old_logp, A, V, values, target, mask)
    rest = {"logp": logp, "old_logp": old_logp, "advantages": A, "mask": mask}
    loss, count, _ = terms(ppo, no_kl(ppo), **rest)
    assert same(policy, loss / count)
    assert same(value, ppo.value_loss(V, values, target, mask, 0.2)[0] / mask.sum())

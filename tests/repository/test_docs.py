"""What the pages promise: commands would start, links and pointers lead somewhere."""

import ast
import importlib
import importlib.util
import math
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from common import launch
from common.distributed import World
from labs import blank, bug

from checks.files import ALGORITHMS, MODULES, PATHS
from tests import adapters
from tests.helpers import ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("labs/**/*.md")]
PAGES += ROOT.glob("variants/*.md")
PROGRAMS = [*PATHS.values(), *ROOT.glob("tools/**/*.py")]  # their headers print commands


def name_of_path(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Commands


def commands(text: str) -> list[tuple[str, list[str], int]]:
    """Return (algorithm or program, words, ranks) of every torchrun or python command for an
    algorithm file or tools.evaluate, on a line of its own or in backticks."""
    text = re.sub(r"`((?:torchrun|python) [^`\n]+)`", r"\n\1\n", text.replace("\\\n", " "))
    runs = []
    for line in map(str.strip, text.splitlines()):
        program = re.match(r"(?:torchrun|python) .*?(?:(\w+)\.py|-m (?:variants\.)?([\w.]+))", line)
        name = program and (program[1] or program[2])
        if name in (*ALGORITHMS, "tools.evaluate"):
            words = shlex.split(line[program.end() :], comments=True)
            sizes = re.findall(r"--(?:nnodes|nproc_per_node)=(\d+)", program[0])
            runs.append((name, words, math.prod(map(int, sizes))))
    return runs


@pytest.mark.parametrize("path", PAGES + PROGRAMS, ids=name_of_path)
def test_every_printed_command_would_start(path, monkeypatch):
    """Its flags exist, and the launcher's own check accepts them at its number of ranks. A command
    with `...` is only a part, whose flags must exist."""
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


@pytest.mark.parametrize("path", PAGES, ids=name_of_path)
def test_every_program_of_a_page_exists(path):
    text = re.sub("git checkout .*", "", path.read_text("utf-8"))
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
    """Return the anchors that GitHub gives to a page's headings."""
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in titles]


@pytest.mark.parametrize("path", PAGES, ids=name_of_path)
def test_links_lead_somewhere(path):
    for link, heading in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", path.read_text()):
        target = path.parent / link if link else path
        assert target.exists(), link
        assert not heading or heading in headings(target.read_text()), (link, heading)


@pytest.mark.parametrize("path", PAGES, ids=name_of_path)
def test_every_pointer_names_a_definition_that_exists(path):
    """Pointers look like `grpo.py: policy_loss` or `grpo.py: --beta`."""
    for file, name in re.findall(r"`([\w/]+\.py): ([\w.-]+)`", path.read_text("utf-8")):
        text = (ROOT / file).read_text("utf-8")
        flag, parts = name.removeprefix("--"), name.split(".")
        patterns = (
            [rf"^    {flag}: "] if flag != name else [rf"^ *(def|class) {x}\b" for x in parts]
        )
        assert all(re.search(pattern, text, re.M) for pattern in patterns), (file, name)


# The table of factors


ROW = re.compile(
    r"^\| \[[^]]+\]\(\S*?(\w+)\.py\) \| (.*?) \| (.*?) \| .*? \| (.*?) \| .*? \|$", re.M
)
# log r, between the files' bounds: 3e-4 and 4e-4 of gspo; 0.2, 0.27 and 0.28; the caps
MADE = torch.tensor([0.0, 3.5e-4, -3.5e-4, 0.21, 0.243, -0.25, 2.0], dtype=torch.float64)
APART = torch.tensor([[-1e-5, 0.0, 1e-5]], dtype=torch.float64)  # between a response's tokens


def factor(cell: str) -> str:
    """Return what a cell multiplies, as Python; 1 if it names nothing."""
    match = re.match(r"(?!none|无)[^`]*`(.*?)`", cell)
    return match[1].replace("²", "**2").replace("τ(", "τ*(") if match else "1"


def product(row: tuple[str, str, str], logs: dict[str, torch.Tensor], A: torch.Tensor, L: int):
    """Return the weight `[N, T]` that a row of the table gives, for A `[N, 1]` or `[N, T]`."""
    log_r, log_w = logs["logp"] - logs["old_logp"], logs["logp"] - logs["rollout_logp"]

    def M(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
        return 1 - (((A > 0) & (x > 1 + b)) | ((A < 0) & (x < 1 - a))).double()

    known = {"M": M, "min": lambda x, cap: x.clamp(max=cap), "sech": lambda x: 1 / x.cosh()}
    known |= {"r": log_r.exp(), "s": log_r.mean(1, keepdim=True).exp()}
    known |= {"w": log_w.sum(1, keepdim=True).exp(), "π_θ": logs["logp"].exp()}
    known |= {"μ": logs["rollout_logp"].exp(), "τ": torch.where(A > 0, 1.0, 1.05), "L": L}
    known |= {"y": range(log_r.shape[1]), "abs": len, "Σabs": lambda y: len(y) * len(log_r)}
    weight = A * torch.ones_like(log_r)
    for cell in row:
        weight = weight * eval(factor(cell), known)
    return weight if "Σabs" in row[-1] else weight / len(log_r)  # a mean over responses, too


@pytest.mark.parametrize("page", ["docs/questions.md", "docs/zh/questions.md"])
def test_a_row_of_the_table_multiplies_to_its_loss_gradient(page):
    """This holds for every row but the three methods as published, at seven ratios and for either
    sign of Â."""
    rows = ROW.findall(re.sub(r"\\\|(\w)\\\|", r"abs(\1)", (ROOT / page).read_text("utf-8")))
    assert len(rows) == 13
    for file, *row in rows:
        if file == "baselines":
            continue
        log_r = (MADE[:, None] + APART).repeat(2, 1)  # [14, 3]
        logp = torch.full_like(log_r, -3.0, requires_grad=True)
        logs = {"logp": logp, "old_logp": logp.detach() - log_r}
        logs["rollout_logp"] = logs["old_logp"] - 0.1
        A = torch.tensor([[1.5]] * len(MADE) + [[-0.5]] * len(MADE), dtype=torch.float64)
        columns = {"mask": torch.ones_like(log_r), "entropy": torch.ones_like(log_r)}
        if file == "opd":
            columns["ref_logp"] = torch.full_like(log_r, -2.5)
        loss, _ = adapters.policy_loss(file, **logs, **columns, advantages=A[:, 0])
        (slope,) = torch.autograd.grad(loss, logp)
        if file == "opd":
            A = columns["ref_logp"] - logp.detach()
        limit = importlib.import_module(MODULES[file]).Args().max_new_tokens
        torch.testing.assert_close(product(row, logs, A, limit), -slope, msg=f"{file}: {row}")

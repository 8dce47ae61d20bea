"""tools.memory against whole commands on fake tensors, and the page's table of what fits."""

import ast
import importlib
import re
import sys

import grpo
import pytest
from checks.files import PATHS
from common.launch import parse
from tools import memory

from tests.helpers import ROOT
from tests.repository.test_docs import commands


@pytest.mark.slow
def test_it_agrees_with_the_fake_within_a_twentieth(monkeypatch):
    """For each row of the page's table of commands for several GPUs."""
    page = (ROOT / "docs/gpu.md").read_text("utf-8")
    rows = re.findall(r"\| ([\w., ]+\.py) \| \S+ \| (\d+) \|((?: [\d.]+ \|){5})", page)
    seen = []
    for names, gpus, numbers in rows:
        peak = max(map(float, re.findall(r"[\d.]+", numbers)))
        for name in re.findall(r"(\w+)\.py", names):
            header = ast.get_docstring(ast.parse(PATHS[name].read_text("utf-8")))
            (words,) = [
                words
                for _, words, ranks in commands(header)
                if ranks == int(gpus) and "..." not in words
            ]
            monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
            args = parse(importlib.import_module(name).Args)
            found = memory.estimate(args, int(gpus), 80.0)["peak"]
            assert found == pytest.approx(peak, rel=0.05), (name, gpus)
            seen.append((name, gpus))
    assert len(seen) == 12


@pytest.mark.slow
def test_the_table_of_the_page_is_the_tools(monkeypatch):
    page = (ROOT / "docs/gpu.md").read_text("utf-8")
    rows = re.findall(r"\| (\d+) GB \| (Qwen3-\S+) \| `(.*)` \| (\S+) \| (\d+) \| (\d+) \|", page)
    assert len(rows) > 10
    for card, model, flags, *shown in rows:
        words = ["--model", f"Qwen/{model}", "--max_new_tokens", "2048", *flags.split()]
        monkeypatch.setattr(sys, "argv", ["grpo.py", *words])
        found = memory.estimate(parse(grpo.Args), 1, float(card))
        assert found["peak"] <= 0.94 * float(card) - 1
        numbers = [f"{found['peak']:.1f}", f"{found['responses']:.0f}", f"{found['host']:.0f}"]
        assert numbers == shown, (card, model)

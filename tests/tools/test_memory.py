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

# GB, by tests.engines.fake_gpu, of each file's last command for several GPUs
PEAKS = {"grpo": 57.7, "stapo": 68.6, "minirl": 71.5, "goldilocks": 56.9}


@pytest.mark.slow
@pytest.mark.parametrize("name", PEAKS)
def test_it_agrees_with_the_fake_within_a_twentieth(name, monkeypatch):
    header = ast.get_docstring(ast.parse(PATHS[name].read_text("utf-8")))
    found = [one for one in commands(header) if one[2] > 1 and "..." not in one[1]]
    _, words, gpus = found[-1]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    args = parse(importlib.import_module(name).Args)
    assert memory.estimate(args, gpus, 80.0)["peak"] == pytest.approx(PEAKS[name], rel=0.05)


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

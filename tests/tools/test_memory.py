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

# GB of the largest phase of each file's last command for several GPUs, by tests.engines.fake_gpu
PEAKS = {"grpo": 0.0, "stapo": 0.0, "minirl": 0.0, "goldilocks": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("name", PEAKS)
def test_it_agrees_with_the_fake_within_a_twentieth(name, monkeypatch):
    header = ast.get_docstring(ast.parse(PATHS[name].read_text("utf-8")))
    found = [one for one in commands(header) if one[2] > 1 and "..." not in one[1]]
    _, words, gpus = found[-1]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    args = parse(importlib.import_module(name).Args)
    estimate = memory.estimate(args, gpus, 80.0)
    assert max(estimate["updating"], estimate["sampling"]) == pytest.approx(PEAKS[name], rel=0.05)


@pytest.mark.slow
def test_the_table_of_the_page_is_what_fits():
    page = (ROOT / "docs/gpu.md").read_text("utf-8")
    rows = re.findall(r"\| (\d+) GB \| (Qwen3-\S+) \| `(.*)` \| (\S+) \| (\d+) \| (\d+) \|", page)
    assert len(rows) == 12
    for card, model, *shown in rows:
        args = grpo.Args(model=f"Qwen/{model}", max_new_tokens=2048, minibatches=1)
        flags, found = memory.fit(args, 1, float(card), set())
        peak = max(found["updating"], found["sampling"])
        numbers = [f"{peak:.1f}", f"{found['responses']:.0f}", f"{found['host']:.0f}"]
        assert [memory.as_words(flags), *numbers] == shown, (card, model)

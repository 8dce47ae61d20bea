"""What the documents promise: commands whose flags exist, memory of real shapes, links that lead somewhere."""

import importlib
import re
import sys

import pytest
import torch
from adapters import ALGORITHMS
from common.tracking import parse
from conftest import ROOT
from gpu.shapes import qwen3_1_7b

sys.path.append(str(ROOT / "docs"))
import memory

README = (ROOT / "README.md").read_text()


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(file, flags) of every torchrun or python command line in a text."""
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    lines = [re.split(r"\s#\s", line)[0] for line in lines if re.match(r"(torchrun|python) ", line)]
    found = [re.search(r"\b(\w+)\.py\b(.*)", line) for line in lines]
    return [(match[1], match[2].replace("...", "").split()) for match in found if match and match[1] in ALGORITHMS]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_header_has_commands_whose_flags_exist(algorithm, monkeypatch):
    """Laptop, one node, several nodes; and one of them for a real model."""
    module = importlib.import_module(algorithm)
    found = commands(module.__doc__)
    assert len(found) >= 3 and all(name == algorithm for name, _ in found)
    assert "--nnodes" in module.__doc__ and any("--model" in flags for _, flags in found)
    for _, flags in found:
        monkeypatch.setattr(sys, "argv", [f"{algorithm}.py", *flags])
        parse(module.Args)


def test_the_readmes_commands_have_flags_that_exist(monkeypatch):
    found = [(name, flags) for name, flags in commands(README) if not any("$" in flag for flag in flags)]
    assert len(found) >= 5
    for name, flags in found:
        flags = [flag.strip('"') for flag in flags]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
        parse(importlib.import_module(name).Args)


def test_the_readme_repeats_the_headers_commands_for_real_models():
    joined = README.replace("\\\n", " ")
    plain = [" ".join(line.split()) for line in joined.splitlines()]
    for name in ALGORITHMS:
        assert all(" ".join(words) in plain for words in memory.commands(name)), name


def test_the_readmes_links_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert len(links) > 15 and all((ROOT / link).exists() for link in links)
    assert all(f"]({algorithm}.py)" in README for algorithm in ALGORITHMS)


def test_memory_is_counted_for_the_shape_that_transformers_builds():
    """Parameters of Qwen3-1.7B: the calculator's against the model's own (norms of heads are left out: 1e-4)."""
    with torch.device("meta"):
        true = sum(p.numel() for p in qwen3_1_7b().parameters())
    assert abs(memory.SHAPES["Qwen/Qwen3-1.7B-Base"].parameters() / true - 1) < 1e-4
    assert abs(memory.SHAPES["Qwen/Qwen3-30B-A3B-Base"].parameters() / 30.53e9 - 1) < 1e-2


def test_every_command_on_a_real_model_fits_80_gb():
    """And what is turned on to save memory saves it in the estimate."""
    for name in ALGORITHMS:
        found = memory.commands(name)
        assert found, name
        for words in found:
            whole = memory.estimate(name, words)
            assert 10 < whole["peak"] < 75, (name, words, whole)
            without = memory.estimate(name, [word for word in words if word != "--gradient_checkpointing"])
            assert without["activations"] > 4 * whole["activations"]

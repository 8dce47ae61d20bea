"""tools.memory: parameters as transformers counts them, and flags that fit the card."""

import re

import pytest
import torch
from tools import memory
from tools.maintain.shapes import qwen3

from tests.helpers import ROOT


def test_parameters_are_those_that_transformers_counts():
    """The norms of heads are left out: 1e-4."""
    with torch.device("meta"):
        true = sum(parameter.numel() for parameter in qwen3(2048, 6144).parameters())
    assert memory.SHAPES["Qwen/Qwen3-1.7B-Base"].parameters() == pytest.approx(true, rel=1e-4)


def test_what_fits_grows_with_the_card_and_the_cards():
    """1.7B: offloaded on 24 GB, not on 80 GB; 8B by itself on 8 cards alone; nothing on 4 GB."""

    def flags(model: str, gpus: int, gpu: float) -> dict | None:
        found = memory.fit(memory.SHAPES[f"Qwen/Qwen3-{model}-Base"], gpus, gpu, 2048)
        return found[0] if found else None

    assert "offload" in flags("1.7B", 1, 24) and "offload" not in flags("1.7B", 1, 80)
    assert "offload" in flags("8B", 1, 80) and "offload" not in flags("8B", 8, 80)
    assert flags("0.6B", 1, 4) is None


def test_the_table_of_the_page_is_the_tools():
    page = (ROOT / "docs/gpu.md").read_text("utf-8")
    table = re.search(r"\| card \| model \|.*?\n\n", page, re.DOTALL)[0]
    assert table.split("\n")[2:-2] == memory.cards()[2:]

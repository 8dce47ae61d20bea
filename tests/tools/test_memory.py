"""tools.memory: parameters as transformers counts them, and estimates that fit the card."""

import re

import pytest
import torch
from checks.files import ALGORITHMS, NINE
from tools import memory
from tools.maintain.shapes import qwen3_1_7b

from tests.helpers import ROOT


def test_parameters_are_those_that_transformers_counts():
    """The norms of heads are left out: 1e-4."""
    with torch.device("meta"):
        true = sum(parameter.numel() for parameter in qwen3_1_7b().parameters())
    assert memory.SHAPES["Qwen/Qwen3-1.7B-Base"].parameters() == pytest.approx(true, rel=1e-4)


def test_what_fits_grows_with_the_card_and_the_cards():
    """1.7B: offloaded on 24 GB, not on 80 GB; 8B by itself on 8 cards alone; nothing on 4 GB."""

    def command(model: str, gpus: int, gpu: float) -> str:
        model = f"Qwen/Qwen3-{model}-Base"
        fits = memory.fit("grpo", model, memory.SHAPES[model], gpus, gpu, 2048)
        return " ".join(fits[0]) if fits else "does not fit"

    assert "--offload " in command("1.7B", 1, 24) and "offload" not in command("1.7B", 1, 80)
    assert "--offload " in command("8B", 1, 80) and "offload" not in command("8B", 8, 80)
    assert command("0.6B", 1, 4) == "does not fit"


def test_every_command_on_a_real_model_fits_80_gb():
    """And a flag that saves memory saves it in the estimate, too."""
    for name in ALGORITHMS:
        assert memory.commands(name), name
        for words in memory.commands(name):
            whole = memory.estimate(name, words)
            assert 10 < whole["peak"] < 75 and whole["host"] < 600, (name, words, whole)
            bare = [word for word in words if word != "--gradient_checkpointing"]
            spared = 4 if bare != words else 1
            without = memory.estimate(name, bare)
            assert without["activations"] >= spared * whole["activations"]
    words = memory.commands("grpo")[0]
    usual, away = memory.estimate("grpo", words), memory.estimate("grpo", [*words, "--offload"])
    assert away["states"] < usual["states"] / 5 and away["peak"] < usual["peak"]


def test_the_tables_of_the_page_are_the_tools(capsys):
    """docs/cluster.md: what each file needs; docs/gpu.md: what one card holds."""
    page = (ROOT / "docs/gpu.md").read_text("utf-8")
    cluster = (ROOT / "docs/cluster.md").read_text("utf-8")
    memory.main(NINE)
    needs = re.search(r"\| file \| model \| parameters \|.*?\n\n", cluster, re.DOTALL)[0]
    printed = capsys.readouterr().out.splitlines()
    assert sorted(needs.split("\n")[2:-2]) == sorted(printed[2:])
    cards = re.search(r"\| card \| model \|.*?\n\n", page, re.DOTALL)[0]
    assert cards.split("\n")[2:-2] == memory.cards()[2:]

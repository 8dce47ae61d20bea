"""The explorer: its built page reads the weights that autograd of the losses gives."""

import importlib
import json
import math
import random
import re
import shutil
import subprocess

import pytest
import torch
from checks.files import MODULES, NINE
from tools import explorer

from tests.helpers import ROOT
from tests.tools.test_browser import BROWSER, drawn

PAGE = ROOT / "docs" / "explorer.html"
NODE = shutil.which("node")


def script(name: str) -> str:
    """Return a script of the built page, by its id."""
    return re.search(rf'<script[^>]* id="{name}">(.*?)</script>', PAGE.read_text("utf-8"), re.S)[1]


def read(points: list[tuple[str, dict, float]]) -> list[float]:
    """Return what the page's own program reads from its tables at (file, values of the axes,
    ratio)."""
    stops = []
    for name, at, ratio in points:
        stops.append([name, {a: explorer.AXES[a].index(value) for a, value in at.items()}, ratio])
    expression = f"{json.dumps(stops)}.map(([name, at, r]) => weightOf(data, name, at, r))"
    program = f"{script('numbers')}\nconst data = {script('data')};\n"
    program += f"console.log(JSON.stringify({expression}))"
    done = subprocess.run([NODE, "-"], input=program, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def single(ratio: float) -> torch.Tensor:
    return torch.tensor([ratio], dtype=torch.float64)


@pytest.mark.skipif(not NODE, reason="needs node")
def test_the_page_has_the_weights_of_autograd():
    """Ten random tokens for each file; the page must be built again after a loss changed.

    Each token is alone, so no file whose weight depends on other responses may be in the page.
    """
    rng, points, expected = random.Random(5), [], []
    for name in json.loads(script("data"))["files"]:
        module = importlib.import_module(MODULES[name])
        unit = explorer.weights(module, explorer.USUAL, single(1.0))
        for _ in range(10):
            at = {axis: rng.choice(stops) for axis, stops in explorer.AXES.items()}
            ratio = math.exp(rng.uniform(math.log(0.02), math.log(min(50, 1 / at["p"]))))
            points.append((name, at, ratio))
            expected.append((explorer.weights(module, at, single(ratio)) / unit).item())
    assert read(points) == pytest.approx(expected, rel=4e-3, abs=4e-3)
    assert sum(weight != 0 for weight in expected) > len(expected) / 3


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="needs chromium: apt-get install chromium")
def test_the_page_is_drawn(tmp_path):
    """The console has no message, and each of the nine has a chart and its weight."""
    shown = shutil.copy(PAGE, tmp_path / "explorer.html")
    weights = drawn(shown, "", r'<strong class="in-.*?</strong>')
    assert len(weights) == len(NINE) and weights[0] == "0"  # the first case: GRPO cuts it

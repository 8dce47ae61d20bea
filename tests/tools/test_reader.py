"""The page that shows two files side by side: its data are the files' lines, marks and gradients.
(In a browser: test_browser.py.)"""

import math
import re

import checks
import pytest
import torch
from checks.files import ALGORITHMS, PATHS, ROOT
from tools import reader
from tools.maintain.marks import marked_lines

from tests.helpers import module_of

RATIOS = (0.11, 0.77, 0.99993, 1.00087, 1.023, 1.33, 7.7)  # between the points of the grid


def interpolated(given: dict, kind: int, sign: int, ratio: float) -> float:
    """As the page does it: linear in log r between the two points around it."""
    curve = given["of"].get(kind, given["of"][0])[sign]
    above = next(i for i, r in enumerate(given["ratios"]) if r > ratio)
    low, high = given["ratios"][above - 1 : above + 1]
    share = math.log(ratio / low) / math.log(high / low)
    return curve[above - 1] + share * (curve[above] - curve[above - 1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_curves_are_the_gradient_of_policy_loss(name):
    """For every kind of token and either sign of the advantage, one batch for each ratio."""
    module, kinds = module_of(name), list(reader.KINDS.values())
    given = reader.curves(module)
    tokens = [(kind, sign) for kind in range(len(kinds)) for sign in (1.0, -1.0)]
    old = torch.tensor([[kinds[kind][0]] for kind, _ in tokens], dtype=torch.float64)
    batch = {
        "mask": torch.ones_like(old),
        "entropy": torch.tensor([[kinds[kind][1]] for kind, _ in tokens], dtype=torch.float64),
        "advantages": torch.tensor([sign for _, sign in tokens], dtype=torch.float64),
    }
    for ratio in RATIOS:
        logp = (old * ratio).clamp(max=1).log().requires_grad_()
        columns = batch | {"old_logp": old.log(), "ref_logp": logp.detach()}
        checks.terms(module, module.Args(), logp=logp, **columns)[0].backward()
        found = (-logp.grad[:, 0] / given["scale"]).tolist()
        for (kind, sign), gradient in zip(tokens, found):
            if ratio * kinds[kind][0] < 1:
                told = interpolated(given, kind, int(sign < 0), ratio)
                assert told == pytest.approx(gradient, rel=6e-3, abs=6e-3), (kind, sign)


def test_the_data_are_the_files_lines_and_marks(tmp_path, monkeypatch):
    """Each line once and in order, without its mark."""
    names = ("grpo", "sapo")
    monkeypatch.setattr(reader, "algorithms", lambda: [PATHS[name] for name in names])
    data = reader.page_data(tmp_path)
    for file, name in zip(data["files"], names, strict=True):
        source = PATHS[name].read_text()
        assert set(file["own"]) == marked_lines(source)
        for number, whole in zip(file["lines"], source.splitlines(), strict=True):
            shown, left = "".join(data["lines"][number][1::2]), re.sub(r"\s*# </?own>$", "", whole)
            assert shown == (left or whole.strip())
        assert (tmp_path / file["link"]).resolve() == ROOT / file["path"]

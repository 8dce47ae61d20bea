"""Every file learns in a few default steps."""

import json
from pathlib import Path

import pytest
from checks import run_of
from checks.files import ALGORITHMS, FIRST

from tests.helpers import metrics, module_of, run_here

# 8 steps of grpo take greedy accuracy from 0.38 to 0.97 and more, with the sign flipped to 0.14 to
# 0.23 (three seeds). In some files less is learned in a step: see `learns_in` in checks/NAME.py.
OTHERS = [name for name in ALGORITHMS if name != FIRST]


def learn(folder: Path, algorithm: str) -> dict:
    steps = run_of(algorithm).learns_in
    flags = ["--steps", steps, "--eval_every", steps, "--eval_problems", 64, "--eval_samples", 1]
    assert run_here(module_of(algorithm).main, *flags, "--run_dir", folder) == 0
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.curves
@pytest.mark.parametrize(
    "algorithm", [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_a_short_run_learns(algorithm, tmp_path):
    """Greedy accuracy rises from below 0.5 to above 0.8, and the run folder is complete."""
    result = learn(tmp_path / "run", algorithm)
    assert result["greedy_before"] < 0.5 and result["greedy_after"] > 0.8
    lines = metrics(tmp_path / "run")
    assert len(lines) == run_of(algorithm).learns_in + 1
    if algorithm == FIRST:  # the warm-up ends
        assert lines[-1]["lr"] == lines[-2]["lr"] == 3e-4
    for name in ("config.json", "samples.jsonl", "curves.png", "summary.json", "checkpoints"):
        assert (tmp_path / "run" / name).exists()

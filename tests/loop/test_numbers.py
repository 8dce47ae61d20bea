"""The first three losses and gradient norms of all nine, on one rank and on two, as they were.

A change of torch, of transformers or of the loop shows. If it is meant,
`python -m tests.loop.test_numbers` writes numbers.json anew.
"""

import json
import tempfile
from pathlib import Path

import pytest
from checks.files import NINE

from tests.helpers import MORE, SMALL, command, metrics

STORED = Path(__file__).with_name("numbers.json")


def first_steps(algorithm: str, ranks: int, folder: Path) -> list[list[float]]:
    """Loss and gradient norm of the first three steps that train."""
    flags = [*SMALL, "--eval_every", 9, *MORE.get(algorithm, []), "--steps", 4]
    ended = command(algorithm, *flags, "--run_dir", folder, ranks=ranks)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in metrics(folder) if "loss" in line]
    return [[line["loss"], line["grad_norm"]] for line in lines[:3]]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("algorithm", NINE)
def test_the_first_steps_are_as_they_were(algorithm, ranks, tmp_path):
    stored = json.loads(STORED.read_text())[f"{algorithm} {ranks}"]
    found = first_steps(algorithm, ranks, tmp_path / "run")
    for step, (now, then) in enumerate(zip(found, stored, strict=True), 1):
        assert now == pytest.approx(then, rel=1e-5, abs=1e-7), step


if __name__ == "__main__":
    numbers = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in NINE:
            for ranks in (1, 2):
                numbers[f"{name} {ranks}"] = first_steps(
                    name, ranks, Path(folder, name, str(ranks))
                )
    STORED.write_text(json.dumps(numbers, indent=1) + "\n")

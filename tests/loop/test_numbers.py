"""The first three losses and gradient norms of all nine, on one rank and on two, as they were.

A change of torch, of transformers or of the loop shows. If it is meant:
`python -m tests.loop.test_numbers > tests/loop/numbers.json`
"""

import json
import os
import platform
import tempfile
from pathlib import Path

import pytest
from checks.files import NINE

from tests.helpers import command, metrics, small, started

STORED = json.loads(Path(__file__).with_name("numbers.json").read_text())
# The same kernels on every x86 CPU: by default those of AVX2 and AVX512 differ by more than 1e-5.
KERNELS = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
KERNELS["ONEDNN_MAX_CPU_ISA"] = "SSE41"


def first_steps(algorithm: str, ranks: int, folder: Path) -> list[list[float]]:
    """Return loss and gradient norm of the first three steps that train."""
    flags = [*small(algorithm), "--eval_every", 9, "--steps", 4]
    ended = command(algorithm, *flags, "--run_dir", folder, ranks=ranks)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in metrics(folder) if "loss" in line]
    return [[line["loss"], line["grad_norm"]] for line in lines[:3]]


@pytest.fixture(scope="module")
def measured() -> dict:
    return json.loads(started("-m", "tests.loop.test_numbers").stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other kernels")
@pytest.mark.parametrize("run", STORED)
def test_the_first_steps_are_as_they_were(run, measured):
    for step, (now, then) in enumerate(zip(measured[run], STORED[run], strict=True), 1):
        assert now == pytest.approx(then, rel=1e-5, abs=1e-7), step


if __name__ == "__main__":
    os.environ |= KERNELS
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name in NINE:
            for ranks in (1, 2):
                steps = first_steps(name, ranks, Path(folder, name, str(ranks)))
                lines.append(f"{json.dumps(f'{name} {ranks}')}: {json.dumps(steps)}")
    print("{\n" + ",\n".join(lines) + "\n}")

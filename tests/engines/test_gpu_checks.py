"""tests/gpu/check.py on the CPU, at a toy's shape: what nobody runs for months would rot."""

import subprocess

import pytest
import torch.distributed as dist

from tests.gpu import check
from tests.helpers import ROOT

QUICK = "exactness ratios norms learns".split()
QUICK += ["two ranks on one card", "8x2048 checkpointing", "8x2048 forward", "vocabulary"]


@pytest.mark.slow
def test_the_gpus_checks_run(capsys):
    """Each without a GPU, in this process; a row for each, in the order of the blocks."""
    assert check.main(QUICK) == 0
    dist.destroy_process_group()
    table = [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines()]
    assert [(name.strip(), verdict.strip()) for name, verdict in table] == [
        (name, "passed") for name in QUICK
    ]


def test_the_calls_in_run_sh_name_every_block_in_its_order():
    """Each once; and an unknown name ends before anything runs."""
    calls = (ROOT / "tests/gpu/run.sh").read_text().splitlines()
    words = [line.split("run.sh")[1].split("  ")[0].split() for line in calls if "/run.sh" in line]
    assert sum(words, []) == [*check.BLOCKS] and len(check.BLOCKS) == 8
    with pytest.raises(SystemExit, match="nope: unknown, use some of facts"):
        check.chosen(["nope"])
    for script in (ROOT / "tests/gpu").glob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)

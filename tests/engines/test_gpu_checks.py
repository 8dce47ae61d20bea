"""tests/gpu/check.py on the CPU, at a toy's shape: what nobody runs for months would rot."""

import subprocess

import pytest
import torch.distributed as dist

from tests.gpu import check
from tests.helpers import ROOT

QUICK = ["losses", "ratios", "8x2048 checkpointing", "8x2048 forward", "vocabulary", "norms"]


def rows(names: list[str], capsys: pytest.CaptureFixture) -> tuple[int, dict[str, str]]:
    """How many failed, and each check's verdict."""
    failed = check.main(names)
    dist.destroy_process_group()
    table = [line.split("|")[1:] for line in capsys.readouterr().out.splitlines()]
    return failed, {cells[0].strip(): cells[1].strip() for cells in table}


@pytest.mark.slow
def test_the_gpus_checks_run(capsys):
    """Each without a GPU, in this process; a row for each, in the order of the blocks."""
    failed, verdicts = rows(QUICK, capsys)
    assert failed == 0 and list(verdicts.items()) == [(name, "passed") for name in QUICK]


@pytest.mark.slow
def test_a_loss_that_differs_on_the_device_is_found(capsys, monkeypatch):
    """The check's own damage: one file's loss is off by 1e-9 in every second call."""
    real, calls = check.grpo.policy_loss, []

    def damaged(*given: object, **columns: object) -> tuple:
        calls.append(1)
        total, count, stats = real(*given, **columns)
        return total + 1e-9 * (len(calls) % 2) * count, count, stats

    monkeypatch.setattr(check.grpo, "policy_loss", damaged)
    assert rows(["losses"], capsys) == (1, {"losses": "FAILED"})


def test_the_calls_in_run_sh_name_every_block_once():
    """And an unknown name ends before anything runs."""
    calls = (ROOT / "tests/gpu/run.sh").read_text().splitlines()
    words = [line.split("run.sh")[1].split("  ")[0].split() for line in calls if "/run.sh" in line]
    assert sorted(sum(words, [])) == sorted(check.BLOCKS) and len(check.BLOCKS) == 7
    with pytest.raises(SystemExit, match="nope: unknown, use some of facts"):
        check.chosen(["nope"])
    subprocess.run(["bash", "-n", str(ROOT / "tests/gpu/run.sh")], check=True)

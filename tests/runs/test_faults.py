"""What goes wrong on real machines: NaN, a full disk, memory. Each ends in a message, and the run
can be resumed."""

import errno
from collections.abc import Callable
from pkgutil import resolve_name

import grpo
import pytest
import torch
from common.records.checkpoint import checkpoints

from tests.helpers import SMALL, assert_same_run, command, drive, forked, metrics, run_here

slow = pytest.mark.slow


def test_several_nans_in_a_row_stop_the_run(tmp_path, monkeypatch, capsys):
    """The loss is NaN from the fourth optimiser step on. The batch is kept to look at."""
    policy_loss, calls = grpo.policy_loss, []

    def loss(*arguments: object) -> tuple:
        total, count = policy_loss(*arguments)
        calls.append(1)
        return total * (float("nan") if len(calls) > 3 else 1.0), count

    monkeypatch.setattr(grpo, "policy_loss", loss)
    assert run_here(grpo.main, *SMALL, "--steps", 9, "--run_dir", tmp_path / "run") == 1
    assert "3 gradients in a row" in capsys.readouterr().err
    batch = torch.load(tmp_path / "run/bad_batch_rank0.pt")
    assert len(batch["tokens"]) == 8 and {"advantages", "old_logp", "sequences"} <= batch.keys()
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]


def at_the(number: int, function: Callable, counts: Callable) -> Callable:
    """Return the function, with the disk full at the end of its `number`th counted call."""
    calls = []

    def sometimes(*arguments: object, **keywords: object) -> object:
        result = function(*arguments, **keywords)
        calls.append(counts(*arguments))
        if calls[-1] and sum(calls) >= number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return result

    return sometimes


FULL = [  # at which function, at the end of which call, and which calls count
    ("common.records.checkpoint.dcp.save", 2, lambda *arguments: True),
    ("common.records.files.flush_to_disk", 4, lambda path: path.name == "metrics.jsonl"),
]


@pytest.mark.parametrize(("place", "number", "counts"), FULL)
def test_a_full_disk(place, number, counts, tmp_path, finished, monkeypatch, capsys):
    """A save ends before it is complete, as after a kill, or the third step's metrics. One line
    says why, the first checkpoint is whole, and resume goes on."""
    flags = [*SMALL, "--steps", 4, "--run_dir", tmp_path / "parts"]
    with monkeypatch.context() as patch:
        patch.setattr(place, at_the(number, resolve_name(place), counts))
        assert run_here(grpo.main, *flags) == 1
    message = capsys.readouterr().err
    assert "No space left" in message and "--resume" in message
    assert message.count("error: ") == 1 and "Traceback" not in message
    assert [path.name for path in checkpoints(tmp_path / "parts")] == ["step_000002"]
    assert run_here(grpo.main, *flags, "--resume") == 0
    assert_same_run(finished, tmp_path / "parts", 4, tmp_path)
    assert not (tmp_path / "parts/checkpoints/partial").exists()


def with_little_room(*flags: object) -> None:
    """Run one of two ranks. The second's disk is full at its second save."""
    torch.save = at_the(2, torch.save, lambda what, path: str(path).endswith("rank1.pt"))
    drive("grpo", flags)


@slow
def test_a_full_disk_on_one_of_two_ranks(tmp_path):
    """One line names the cause, and nobody waits. Resume goes on from the first checkpoint."""
    flags = [*SMALL, "--steps", 4, "--run_dir", tmp_path / "run"]
    ended = forked(with_little_room, *flags, ranks=2)
    assert ended.codes == [1, 1] and "Traceback" not in ended.stderr, ended.stderr
    assert ended.stderr.count("error: ") == 1 and "No space left on device" in ended.stderr
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step_000002"]
    assert command("grpo", *flags, "--resume", ranks=2).codes == [0, 0]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]

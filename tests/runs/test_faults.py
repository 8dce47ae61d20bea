"""What goes wrong on real machines: NaN, a full disk, memory, a lost rank. Each ends in a message
and is resumable."""

import errno
from types import SimpleNamespace

import common.plumbing.checkpoint
import grpo
import pytest
import torch
from common.plumbing.folder import checkpoints
from common.rollout import HFEngine
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.driver import drive
from tests.helpers import ROOT, SMALL, assert_same_run, command, forked, metrics, run_here, started

pytestmark = pytest.mark.runs


def poisoned(monkeypatch, when) -> None:
    """A loss that is NaN in the optimiser steps that `when(number)` names."""
    policy_loss, calls = grpo.policy_loss, []

    def loss(*arguments: object, **keywords: object) -> tuple:
        total, count, stats = policy_loss(*arguments, **keywords)
        calls.append(1)
        return total * (float("nan") if when(len(calls)) else 1.0), count, stats

    monkeypatch.setattr(grpo, "policy_loss", loss)


def test_a_nan_is_skipped_and_counted(tmp_path, monkeypatch):
    """Two of six updates are NaN: they are skipped, the rest go on, the weights stay finite."""
    poisoned(monkeypatch, lambda number: number in (2, 5))
    flags = [*SMALL, "--steps", 3, "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags) == 0
    lines = metrics(tmp_path / "run")[1:]
    assert [line["skipped"] for line in lines] == [1, 0, 1]
    assert all(0 < line["grad_norm"] < 100 for line in lines)


def test_a_skipped_update_changes_nothing(tmp_path, monkeypatch):
    """All updates of a step NaN: weights and optimiser moments are those from before."""
    flags = [*SMALL, "--save_every", 1, "--run_dir", tmp_path / "run", "--save_hf"]
    assert run_here(grpo.main, *flags, "--steps", 1) == 0
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").state_dict()
    poisoned(monkeypatch, lambda number: True)
    assert run_here(grpo.main, *flags, "--steps", 2, "--resume") == 0
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_several_nans_in_a_row_stop_the_run(tmp_path, monkeypatch, capsys):
    poisoned(monkeypatch, lambda number: number > 3)
    assert run_here(grpo.main, *SMALL, "--steps", 9, "--run_dir", tmp_path / "run") == 1
    said = capsys.readouterr().err
    assert "3 gradients in a row" in said and f"{tmp_path}/run/bad_batch_rank0.pt" in said
    assert "logp" not in (batch := torch.load(tmp_path / "run/bad_batch_rank0.pt"))
    assert len(batch["tokens"]) == 8 and {"advantages", "old_logp", "sequences"} <= batch.keys()
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]


@pytest.mark.parametrize(("where", "room"), [("shards", 0), ("rank", 2**30)])
def test_a_full_disk_during_a_save(tmp_path, finished, monkeypatch, capsys, where, room):
    """The second save fails: a line that says why, the first checkpoint whole, resume goes on."""
    flags = [*SMALL, "--steps", 4]
    owner, name = (common.plumbing.checkpoint.dcp, "save") if where == "shards" else (torch, "save")
    save, saves = getattr(owner, name), []

    def full(*arguments: object, **keywords: object) -> None:
        saves.append(where == "shards" or str(arguments[1]).endswith("rank0.pt"))
        if sum(saves) == 2 and saves[-1]:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 7 vs 5")
        save(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        # What torch says of it tells nobody that the disk is full
        patch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=room))
        assert run_here(grpo.main, *flags, "--run_dir", tmp_path / "parts") == 1
    said = capsys.readouterr().err
    assert "cannot save" in said and f"where {room // 2**20} MB are free" in said
    assert "unexpected pos 7 vs 5" in said and "--resume" in said
    assert said.count("error: ") == 1 and "Traceback" not in said
    assert [path.name for path in checkpoints(tmp_path / "parts")] == ["step_000002"]
    flags += ["--run_dir", tmp_path / "parts", "--resume"]
    assert run_here(grpo.main, *flags) == 0
    assert_same_run(finished, tmp_path / "parts", 4, tmp_path)


def test_a_full_disk_during_the_first_save(tmp_path, monkeypatch, capsys):
    """Nothing is there to go on from, and nothing is said to be."""
    monkeypatch.setattr(common.plumbing.checkpoint.dcp, "save", None)
    assert run_here(grpo.main, *SMALL, "--steps", 2, "--run_dir", tmp_path / "run") == 1
    said = capsys.readouterr().err
    assert "nothing is saved yet: start again" in said and "--resume" not in said


def with_little_room(*flags: object) -> None:
    """One of two ranks; the second's disk is full at its second save."""
    save, saves = torch.save, []

    def full(what: object, path: object) -> None:
        saves.append(str(path).endswith("rank1.pt"))
        if sum(saves) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(what, path)

    torch.save = full
    drive("grpo", flags)


def test_a_full_disk_on_one_of_two_ranks(tmp_path):
    """One line names the cause, nobody waits; the first checkpoint is whole, resume goes on."""
    flags = [*SMALL, "--steps", 4, "--run_dir", tmp_path / "run"]
    ended = forked(with_little_room, *flags, ranks=2)
    assert ended.codes == [1, 1] and "Traceback" not in ended.stderr, ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if "error: " in line)
    assert "cannot save" in line and "step_000004, where" in line
    assert "No space left on device" in line
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step_000002"]
    assert command("grpo", *flags, "--resume", ranks=2).codes == [0, 0]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]


def without_memory(phase: str, *flags: object) -> None:
    """A run whose update or rollout asks for more memory than there is."""

    def out(*arguments: object, **keywords: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    setattr(grpo if phase == "response_logprobs" else HFEngine, phase, out)
    drive("grpo", flags)


@pytest.mark.parametrize(
    ("phase", "flag"),
    [
        ("response_logprobs", "--micro_tokens"),
        ("generate", "--rollout_rows or --vllm_memory"),
        ("__init__", "--vllm_memory (what fits: tools.memory --model)"),  # the engine's
    ],
)
def test_out_of_memory_names_the_flag_to_lower(tmp_path, phase, flag):
    """In the update as in the rollout; exit code 1 and one line."""
    run = forked(without_memory, phase, *SMALL, "--steps", 2, "--run_dir", tmp_path / "run")
    assert run.returncode == 1 and "Traceback" not in run.stderr, run.stderr
    assert f"lower {flag}" in run.stderr and "Tried to allocate 9 GiB" in run.stderr


def test_a_lost_rank_ends_the_others_and_the_run_resumes(tmp_path):
    """Of two gloo ranks of a real torchrun the second is killed in mid-update: both end soon, it is
    named, `--resume` reaches the end."""
    flags = [*SMALL, "--save_every", 1, "--run_dir", tmp_path / "run"]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    lost = started(*ranks, "tests/driver.py", "grpo", "lost", 5, *flags, "--steps", 100)
    assert lost.returncode != 0, lost.stderr
    # No traceback but torchrun's own
    assert "common/plumbing/launch.py" not in lost.stderr, lost.stderr
    assert "error: rank 0 lost contact to another rank in update" in lost.stderr
    assert "go on with --resume" in lost.stderr
    cause = lost.stderr.partition("Root Cause")[2]
    assert "rank      : 1" in cause and "SIGKILL" in cause, lost.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]
    again = command("grpo", *flags, "--steps", 4, "--resume", ranks=2)
    assert again.returncode == 0, again.stderr[-3000:]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]


def test_save_hf_is_loadable_and_the_trained_model(tmp_path):
    """By transformers, with its tokenizer; the weights are those of the last checkpoint; it serves
    as --model."""
    for model in ("tiny", "tiny-moe"):
        folder = tmp_path / model
        words = [*SMALL, "--model", model, "--steps", 1, "--eval_every", 1, "--save_hf"]
        words += ["--run_dir", folder]
        assert run_here(grpo.main, *words) == 0
        lm, tokenizer = (
            kind.from_pretrained(folder / "model") for kind in (AutoModelForCausalLM, AutoTokenizer)
        )
        assert tokenizer("7*8=")["input_ids"] and lm.config.tie_word_embeddings
        base = AutoModelForCausalLM.from_pretrained(
            ROOT / "common/tiny" / {"tiny": "model"}.get(model, "model-moe")
        )
        assert any(not torch.equal(a, b) for a, b in zip(lm.parameters(), base.parameters()))
        again = [*SMALL, "--model", folder / "model", "--steps", 1]
        assert run_here(grpo.main, *again, "--run_dir", tmp_path / f"{model}-again") == 0
        assert metrics(folder)[-1]["greedy"] == metrics(tmp_path / f"{model}-again")[0]["greedy"]

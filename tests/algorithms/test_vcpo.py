"""VCPO in a run: what is measured, the queue's lag, sampling beside the update."""

import json
import signal

import pytest
import torch
import vcpo
from common.batch import Rollout
from common.distributed import gather
from common.logprobs import Policy
from common.plumbing.model import load_model
from common.rollout import HFEngine

from tests.helpers import SMALL, assert_same_run, command, metrics, run_here

pytestmark = pytest.mark.runs


def test_equal_groups_are_not_measured(world, monkeypatch):
    """Their b is their mean, whatever the norms: a shift of 0, and no pass for them."""
    lm, tokenizer = load_model("tiny")
    engine = HFEngine(lm, world, 0, "float32", 64)
    batch = engine.generate([tokenizer(p)["input_ids"] for p in ("1+2=", "7*8-9+6=")], 6, 64, 1.0)
    batch.advantages = vcpo.advantages(torch.tensor([[1.0] * 6, [1, 0, 0, 1, 1, 0]])).flatten()
    measured, measure = [], vcpo.gradient_norms

    def watched(policy: Policy, rows: Rollout, *rest: object) -> tuple:
        measured.append(rows.sequences)
        return measure(policy, rows, *rest)

    monkeypatch.setattr(vcpo, "gradient_norms", watched)
    shifts = vcpo.baseline_shifts(vcpo.Args(group_size=6), Policy(lm), batch, world)
    assert len(measured) == 1 and torch.equal(measured[0], batch.sequences[6:])
    assert (shifts[:6] == 0).all() and (shifts[6:] == shifts[6]).all() and shifts[6].abs() > 0.05
    off = vcpo.Args(group_size=6, optimal_baseline=False)
    assert not vcpo.baseline_shifts(off, Policy(lm), batch, world).any() and len(measured) == 1


def test_gather_keeps_rank_order(world):
    assert gather(torch.tensor([1.0, 2.0]), world).tolist() == [1.0, 2.0]
    assert len(gather(torch.zeros(0), world)) == 0


def test_tokens_are_those_sampled_in_the_step(tmp_path, monkeypatch):
    """Not those of the batch that is due: its tokens were counted when it was sampled."""
    draw, drawn = vcpo.Stale.sample, []

    def counted(self: vcpo.Stale, prompts: list) -> Rollout:
        rollout = draw(self, prompts)
        drawn.append(rollout.mask.sum().item())
        return rollout

    monkeypatch.setattr(vcpo.Stale, "sample", counted)
    flags = [*SMALL, "--minibatches", 1, "--steps", 6, "--lag", 2, "--run_dir", tmp_path / "run"]
    assert run_here(vcpo.main, *flags) == 0
    counts = [line["tokens"] for line in metrics(tmp_path / "run") if "tokens" in line]
    assert counts == drawn and len(set(counts)) > 3


@pytest.mark.parametrize("lag", [0, 2])
def test_the_lag_is_exactly_k_after_warm_up(tmp_path, lag):
    """The first `lag` steps only fill the queue (and log what they sampled); then it climbs 0, 1,
    ..., k and stays. ESS is 1 while it is 0."""
    flags = [*SMALL, "--minibatches", 1, "--steps", 6, "--lag", lag, "--run_dir", tmp_path / "run"]
    assert run_here(vcpo.main, *flags) == 0
    lines = metrics(tmp_path / "run")[1:]
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert all("reward" in line for line in lines)
    assert [line["step"] for line in lines if "lag" in line] == list(range(1 + lag, 7))
    lines = lines[lag:]
    assert [line["lag"] for line in lines] == [min(i, lag) for i in range(6 - lag)]
    assert all(line["ess_ratio"] > 1 - 1e-6 for line in lines if line["lag"] == 0)
    assert (lines[-1]["ess_ratio"] < 1 - 1e-5) == (lag > 0)
    assert all(abs(line["lr_scale"] - line["ess_ratio"] ** 0.5) < 1e-6 for line in lines)


def test_switches(tmp_path):
    """Both halves off: the step keeps its length and the baseline is the group's mean; warm-up
    counts batches."""
    flags = [*SMALL, "--minibatches", 1, "--steps", 4, "--lag", 2, "--run_dir", tmp_path / "run"]
    assert (
        run_here(vcpo.main, *flags, "--warmup", 5, "--no_ess_scaling", "--no_optimal_baseline") == 0
    )
    lines = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ][3:]
    assert all(line["lr_scale"] == 1 and line["baseline_shift"] == 0 for line in lines)
    assert [line["lr"] for line in lines] == [3e-4 * 1 / 5, 3e-4 * 2 / 5]


def test_lag_is_counted_in_updates(tmp_path):
    """Two mini-batches a batch: a batch that waited for two others is four updates old."""
    flags = [*SMALL, "--minibatches", 2, "--steps", 6, "--lag", 2, "--run_dir", tmp_path / "run"]
    assert run_here(vcpo.main, *flags) == 0
    assert [line["lag"] for line in metrics(tmp_path / "run")[3:]] == [0, 2, 4, 4]


def test_a_signal_while_the_queue_fills(tmp_path):
    """The step is finished and saved, queue and all, as later ones are; the resumed run is the
    uninterrupted one."""
    flags = [*SMALL, "--minibatches", 1, "--lag", 4, "--steps", 6]
    stopped = command("vcpo", *flags, "--run_dir", tmp_path / "parts", at=("term", 2))
    assert stopped.returncode == 0, stopped.stderr[-2000:]
    assert [line["step"] for line in metrics(tmp_path / "parts")] == [0, 1, 2]
    for where in (["--run_dir", tmp_path / "parts", "--resume"], ["--run_dir", tmp_path / "whole"]):
        assert run_here(vcpo.main, *flags, *where) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 6, tmp_path)


ASYNC = [*SMALL, "--minibatches", 1, "--lag", 2, "--async", "--eval_every", 3]


def test_async_keeps_the_lag_and_leaves_some_steps_in_turn(tmp_path, capsys, monkeypatch):
    """The overlap is one of the k updates: k - 1 batches wait. Now and then one is sampled in turn,
    and checked; when does not depend on what is measured or on how long the run is."""
    monkeypatch.setattr(vcpo, "CHECK_EVERY", 4)
    assert run_here(vcpo.main, *ASYNC, "--steps", 9, "--run_dir", tmp_path / "run") == 0
    assert "not the speed-up" in capsys.readouterr().out
    lines = metrics(tmp_path / "run")[1:]
    assert [line["step"] for line in lines if "lag" in line] == list(range(2, 10))
    # Sampled for steps 1 to 9 with the weights of 0 0 0 1 3 3 4 5 7 updates; trained on a step
    # later: 0 to 7.
    assert [line["lag"] for line in lines[1:]] == [0, 1, 2, 2, 1, 2, 2, 2]
    assert [line["step"] for line in lines if "sampler_gap" in line] == [1, 2, 5, 9]


def test_async_samples_with_the_weights_it_says(tmp_path, monkeypatch):
    """No update reaches the sampler while it samples: every rollout's μ is the trainer's log-prob
    of that version."""
    weights, versions, generate, sync = [], [], HFEngine.generate, HFEngine.sync

    def synced(self: HFEngine, policy: torch.nn.Module) -> None:
        sync(self, policy)
        new = [p.clone() for p in self.lm.parameters()]
        if not weights or not all(map(torch.equal, new, weights[-1])):
            weights.append(new)

    def sampled(self: HFEngine, *arguments: object, **keywords: object) -> object:
        before = [p.clone() for p in self.lm.parameters()]
        rollout = generate(self, *arguments, **keywords)
        same = [all(map(torch.equal, before, known)) for known in weights]
        assert all(map(torch.equal, before, self.lm.parameters()))
        versions.append(same.index(True))
        return rollout

    monkeypatch.setattr(HFEngine, "sync", synced)
    monkeypatch.setattr(HFEngine, "generate", sampled)
    flags = [*ASYNC[:-1], 100, "--steps", 6, "--run_dir", tmp_path / "run"]
    assert run_here(vcpo.main, *flags) == 0
    assert versions[2:-2] == [0, 0, 0, 1, 2, 3, 4]  # between the evaluations: two calls each


def test_async_resumes_with_more_steps_to_the_bit(tmp_path):
    """A run of 3 steps that goes on to 7, evaluated at other steps, is the one of 7 at once."""
    flags, run = [*ASYNC, "--save_every", 3], ["--run_dir", tmp_path / "parts"]
    assert run_here(vcpo.main, *flags, "--steps", 7, "--run_dir", tmp_path / "whole") == 0
    assert run_here(vcpo.main, *flags, "--steps", 3, *run) == 0
    assert run_here(vcpo.main, *flags, "--steps", 7, *run, "--resume") == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 7, tmp_path)


def test_async_resumes_to_the_bit(tmp_path):
    """The batch sampled ahead is in the checkpoint."""
    flags = [*ASYNC, "--steps", 7, "--save_every", 3]
    assert run_here(vcpo.main, *flags, "--run_dir", tmp_path / "whole") == 0
    killed = command("vcpo", *flags, "--run_dir", tmp_path / "parts", at=("log", 5))
    assert killed.returncode == -signal.SIGKILL
    state = torch.load(tmp_path / "parts/checkpoints/step_000003/rank0.pt")["state"]
    assert state["ahead"] and len(state["queue"]) == 1
    assert run_here(vcpo.main, *flags, "--run_dir", tmp_path / "parts", "--resume") == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 7, tmp_path)

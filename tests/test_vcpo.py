"""VCPO in a run: exact per-response gradients, the queue's lag, sampling beside the update."""

import json
import signal
from dataclasses import replace

import pytest
import torch
import vcpo
from common.distributed import gather
from common.logprobs import Policy, response_logprobs
from common.model import load_model
from common.rollout import HFEngine
from common.tracking import Means

from tests.helpers import SMALL, assert_same_run, command, metrics, run_here


def test_group_gradient_is_what_autograd_gives_the_slow_way(world):
    """Per-response gradients one by one, the baseline by its formula, the loss written out: the
    same sum."""
    lm, tokenizer = load_model("tiny")
    group = HFEngine(lm, world, 0, "float32", 64).generate(
        [tokenizer("7*8-9+6=")["input_ids"]], 6, 64, 1.0
    )
    generator = torch.Generator().manual_seed(2)
    group.old_logp = group.rollout_logp
    group.rollout_logp = (
        group.rollout_logp + 0.1 * torch.randn(group.mask.shape, generator=generator) * group.mask
    )
    group.advantages = vcpo.advantages(torch.tensor([[1.0, 0, 0, 1, 1, 0]]))[0]
    policy, args = Policy(lm), vcpo.Args()
    parameters = list(policy.parameters())
    found = [torch.zeros_like(p) for p in parameters]
    log_w = vcpo.add_group_gradient(args, policy, group, True, parameters, found, Means(), world)

    logp, _ = response_logprobs(policy, group, 1.0)
    slow_w = ((logp.detach() - group.rollout_logp) * group.mask).sum(1)
    assert torch.allclose(log_w, slow_w, atol=1e-4) and slow_w.abs().max() > 0.1
    rows = [torch.autograd.grad(row.sum(), parameters, retain_graph=True) for row in logp]
    norms = torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in rows])
    weights = slow_w.exp() ** 2 * norms**2
    shift = (weights * group.advantages).sum() / weights.sum()
    assert shift.abs() > 0.05
    factor = -slow_w.exp().clamp(max=8) * (group.advantages - shift) / group.mask.sum(1)
    for i, ours in enumerate(found):
        expected = sum(f * row[i] for f, row in zip(factor, rows))
        assert torch.allclose(ours, expected, rtol=1e-3, atol=1e-4 * expected.abs().max())
    plain, off = [torch.zeros_like(p) for p in parameters], replace(args, optimal_baseline=False)
    vcpo.add_group_gradient(off, policy, group, True, parameters, plain, Means(), world)
    assert not torch.allclose(plain[0], found[0], rtol=1e-2)


def test_gather_keeps_rank_order(world):
    assert (
        gather(torch.tensor([1.0, 2.0]), world).tolist() == [1.0, 2.0]
        and len(gather(torch.zeros(0), world)) == 0
    )


@pytest.mark.parametrize("lag", [0, 2])
def test_the_lag_is_exactly_k_after_warm_up(tmp_path, monkeypatch, lag):
    """The first `lag` steps only fill the queue (and log what they sampled); then it climbs 0, 1,
    ..., k and stays. ESS is 1 while it is 0."""
    flags = [*SMALL, "--minibatches", 1, "--steps", 6, "--lag", lag, "--run_dir", tmp_path / "run"]
    assert run_here(monkeypatch, vcpo.main, *flags) == 0
    lines = metrics(tmp_path / "run")[1:]
    assert [line["step"] for line in lines] == list(range(1, 7)) and all(
        "reward" in line for line in lines
    )
    assert [line["step"] for line in lines if "lag" in line] == list(range(1 + lag, 7))
    lines = lines[lag:]
    assert [line["lag"] for line in lines] == [min(i, lag) for i in range(6 - lag)]
    assert all(line["ess_ratio"] > 1 - 1e-6 for line in lines if line["lag"] == 0)
    assert (lines[-1]["ess_ratio"] < 1 - 1e-5) == (lag > 0)
    assert all(abs(line["lr_scale"] - line["ess_ratio"] ** 0.5) < 1e-6 for line in lines)


def test_switches(tmp_path, monkeypatch):
    """Both halves off: the step keeps its length and the baseline is the group's mean; warm-up
    counts batches."""
    flags = [*SMALL, "--minibatches", 1, "--steps", 4, "--lag", 2, "--run_dir", tmp_path / "run"]
    assert (
        run_here(
            monkeypatch,
            vcpo.main,
            *flags,
            "--warmup",
            5,
            "--no_ess_scaling",
            "--no_optimal_baseline",
        )
        == 0
    )
    lines = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ][3:]
    assert all(line["lr_scale"] == 1 and line["baseline_shift"] == 0 for line in lines)
    assert [line["lr"] for line in lines] == [3e-4 * 1 / 5, 3e-4 * 2 / 5]


def test_lag_is_counted_in_updates(tmp_path, monkeypatch):
    """Two mini-batches a batch: a batch that waited for two others is four updates old."""
    flags = [*SMALL, "--minibatches", 2, "--steps", 6, "--lag", 2, "--run_dir", tmp_path / "run"]
    assert run_here(monkeypatch, vcpo.main, *flags) == 0
    assert [line["lag"] for line in metrics(tmp_path / "run")[3:]] == [0, 2, 4, 4]


def test_a_signal_while_the_queue_fills(tmp_path, monkeypatch):
    """The step is finished and saved, queue and all, as later ones are; the resumed run is the
    uninterrupted one."""
    flags = [*SMALL, "--minibatches", 1, "--lag", 4, "--steps", 6]
    stopped = command("vcpo", *flags, "--run_dir", tmp_path / "parts", at=("term", 2))
    assert stopped.returncode == 0, stopped.stderr[-2000:]
    assert [line["step"] for line in metrics(tmp_path / "parts")] == [0, 1, 2]
    for where in (["--run_dir", tmp_path / "parts", "--resume"], ["--run_dir", tmp_path / "whole"]):
        assert run_here(monkeypatch, vcpo.main, *flags, *where) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 6, tmp_path)


ASYNC = [*SMALL, "--minibatches", 1, "--lag", 2, "--async", "--eval_every", 4]


def test_async_keeps_the_lag_and_leaves_evaluated_steps_in_turn(tmp_path, monkeypatch, capsys):
    """The overlap is one of the k updates: k - 1 batches wait. After an evaluation one is sampled
    in turn, checked."""
    assert (
        run_here(monkeypatch, vcpo.main, *ASYNC, "--steps", 9, "--run_dir", tmp_path / "run") == 0
    )
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
    assert run_here(monkeypatch, vcpo.main, *flags) == 0
    assert versions[2:-2] == [0, 0, 0, 1, 2, 3]  # between the evaluations: two calls each


def test_async_resumes_to_the_bit(tmp_path, monkeypatch):
    """The batch sampled ahead is in the checkpoint."""
    flags = [*ASYNC, "--steps", 7, "--save_every", 3]
    assert run_here(monkeypatch, vcpo.main, *flags, "--run_dir", tmp_path / "whole") == 0
    killed = command("vcpo", *flags, "--run_dir", tmp_path / "parts", at=("log", 5))
    assert killed.returncode == -signal.SIGKILL
    state = torch.load(tmp_path / "parts/checkpoints/step_000003/rank0.pt")["state"]
    assert state["ahead"] and len(state["queue"]) == 1
    assert (
        run_here(monkeypatch, vcpo.main, *flags, "--run_dir", tmp_path / "parts", "--resume") == 0
    )
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 7, tmp_path)


@pytest.mark.parametrize("flag", ["--vllm_sleep", "--tensor_parallel=2"])
def test_what_does_not_go_with_async_is_refused(tmp_path, monkeypatch, capsys, flag):
    assert (
        run_here(monkeypatch, vcpo.main, *ASYNC, flag, "--steps", 9, "--run_dir", tmp_path / "run")
        == 2
    )
    assert "--async: not together" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize("lag", [-1, 8])
def test_an_impossible_lag_is_refused(tmp_path, monkeypatch, capsys, lag):
    assert (
        run_here(monkeypatch, vcpo.main, "--lag", lag, "--steps", 8, "--run_dir", tmp_path / "run")
        == 2
    )
    assert f"--lag {lag}: must be" in capsys.readouterr().err and not (tmp_path / "run").exists()

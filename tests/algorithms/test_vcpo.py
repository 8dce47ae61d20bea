"""VCPO in a run: what is measured, the queue's lag, sampling beside the update."""

import json

import pytest
import torch
import vcpo
from common.batch import Rollout
from common.logprobs import Policy
from common.plumbing.model import load_model
from common.rollout import HFEngine

from tests.helpers import SMALL, assert_same_run, metrics, run_here


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


def test_the_lag_is_exactly_k_after_warm_up(tmp_path):
    """The first k = 2 steps only fill the queue (and log what they sampled); then it climbs 0, 1, 2
    and stays. ESS is 1 while it is 0."""
    flags = [*SMALL, "--minibatches", 1, "--steps", 6, "--lag", 2, "--run_dir", tmp_path / "run"]
    assert run_here(vcpo.main, *flags) == 0
    lines = metrics(tmp_path / "run")[1:]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all("reward" in line for line in lines)
    assert [line.get("lag") for line in lines] == [None, None, 0, 1, 2, 2]
    assert lines[2]["ess_ratio"] > 1 - 1e-6 and lines[5]["ess_ratio"] < 1 - 1e-5
    assert all(abs(line["lr_scale"] - line["ess_ratio"] ** 0.5) < 1e-6 for line in lines[2:])


@pytest.mark.slow
def test_switches(tmp_path):
    """Both halves off: the step keeps its length and the baseline is the group's mean; warm-up
    counts batches. Two mini-batches a batch: one that waited for two others is four updates old."""
    flags = [*SMALL, "--steps", 6, "--lag", 2, "--run_dir", tmp_path / "run"]
    off = ["--warmup", 5, "--no_ess_scaling", "--no_optimal_baseline"]
    assert run_here(vcpo.main, *flags, *off) == 0
    text = (tmp_path / "run/metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()][3:]
    assert all(line["lr_scale"] == 1 and line["baseline_shift"] == 0 for line in lines)
    assert [line["lag"] for line in lines] == [0, 2, 4, 4]
    assert [line["lr"] for line in lines] == [3e-4 * batch / 5 for batch in (1, 2, 3, 4)]


@pytest.mark.slow
def test_async_resumes_with_more_steps_to_the_bit(tmp_path):
    """A run of 3 steps that goes on to 7, with a batch sampled ahead in its checkpoint, is the one
    of 7 at once."""
    flags = [*SMALL, "--minibatches", 1, "--lag", 2, "--async", "--eval_every", 3]
    flags, run = [*flags, "--save_every", 3], ["--run_dir", tmp_path / "parts"]
    assert run_here(vcpo.main, *flags, "--steps", 7, "--run_dir", tmp_path / "whole") == 0
    assert run_here(vcpo.main, *flags, "--steps", 3, *run) == 0
    assert run_here(vcpo.main, *flags, "--steps", 7, *run, "--resume") == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 7, tmp_path)

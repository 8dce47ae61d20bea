"""A real model through the whole loop: opt-in, `REALMODEL=folder pytest -m realmodel` (see
tools/make_smollm2.py)."""

import json
import os

import grpo
import pytest
from checks.files import ROOT

from tests.helpers import metrics, run_here

FOLDER = os.environ.get("REALMODEL", "")


@pytest.mark.realmodel
@pytest.mark.skipif(not FOLDER, reason="set REALMODEL to a folder made by tools.make_smollm2")
def test_a_real_model_learns_and_resumes(tmp_path, monkeypatch):
    """SmolLM2-135M on two-digit sums: a task file's reward, sampler check; 8 steps, then 2 after a
    resume."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(os.cpu_count()))
    task = ROOT / "labs/real/sums.py"
    flags = ["--model", FOLDER, "--task", task, "--run_dir", tmp_path / "run"]
    flags += "--prompts_per_step 8 --minibatches 2 --max_new_tokens 6 --lr 2e-5".split()
    flags += "--eval_problems 16 --eval_samples 1 --eval_every 100".split()
    assert run_here(grpo.main, *flags, "--steps", 8) == 0
    assert run_here(grpo.main, *flags, "--steps", 10, "--resume") == 0
    lines = metrics(tmp_path / "run")
    rewards = [line["reward"] for line in lines[1:]]
    assert len(rewards) == 10 and sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert all(line["sampler_gap"] < 1e-4 for line in lines[1:])
    assert json.loads((tmp_path / "run/summary.json").read_text())["greedy_after"] > 0.4

"""A real model through the whole loop: opt-in, `REALMODEL=folder pytest -m realmodel` (see
tools/make_smollm2.py)."""

import json
import os
from types import SimpleNamespace

import grpo
import pytest
import torch
from checks.files import ROOT
from common.logprobs import Policy, response_logprobs
from common.model import load_model
from variants import tool

from tests.helpers import metrics, run_here

FOLDER = os.environ.get("REALMODEL", "")


pytestmark = [
    pytest.mark.realmodel,
    pytest.mark.skipif(not FOLDER, reason="set REALMODEL to a folder made by tools.make_smollm2"),
]


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


def test_a_tool_reads_tokens_that_a_text_would_change(world):
    """Some responses would get other ids if they were encoded again. With replies after full stops
    all tokens are still those that were sampled: the trainer agrees with their log μ."""
    lm, tokenizer = load_model(FOLDER)
    args = tool.Args(rollout="hf", dtype="float32", turn_end=".", max_turns=3)
    task = SimpleNamespace(held_out=[], tokenizer=tokenizer)
    task.reply = lambda texts, answers: [(" Then", "")] * len(texts)
    turns = tool.Turns(args, lm, task, world)
    prompts = [tokenizer(text)["input_ids"] for text in ("A list of rare animals:", "In Kyoto")]
    made = turns.generate(prompts, 16, 48, 1.0, answers=["", ""])
    ids = made.response_ids()
    assert made.calls.sum() > 8
    assert any(tokenizer(tokenizer.decode(row))["input_ids"] != row for row in ids)
    with torch.no_grad():
        logp, _ = response_logprobs(Policy(lm), made, 1.0)
    assert torch.allclose(logp, made.rollout_logp, atol=1e-3)

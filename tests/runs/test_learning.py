"""Every file learns in a few default steps, and the test of that can fail."""

import json
from pathlib import Path

import grpo
import pytest

from tests.helpers import RUN, metrics, module_of, run_here

pytestmark = pytest.mark.runs


# One update per batch, and none in the first eight steps; five in which the critic learns alone
STEPS = {"vcpo": 30, "ppo": 15}


def learn(tmp_path: Path, main, *flags: object) -> dict:
    folder = tmp_path / "learning"
    steps = STEPS.get(main.__module__.rpartition(".")[2], 10)
    measured = ["--eval_every", steps, "--eval_problems", 128, "--eval_samples", 1]
    flags = ["--steps", steps, *measured, "--run_dir", folder, *flags]
    assert run_here(main, *flags) == 0
    return json.loads((folder / "summary.json").read_text()) | {"metrics": metrics(folder)}


@pytest.mark.curves
@pytest.mark.parametrize("algorithm", RUN)
def test_a_short_run_learns(algorithm, tmp_path, capsys):
    """10 default steps: greedy from 0.34 to at least 0.8, longer responses, and the run folder is
    complete."""
    result = learn(tmp_path, module_of(algorithm).main)
    assert result["greedy_before"] < 0.5 and result["greedy_after"] > 0.8
    assert result["sampled_after"] > result["sampled_before"] + 0.08
    lengths = [line["response_len"] for line in result["metrics"][1:]]
    assert sum(lengths[-3:]) > 1.2 * sum(lengths[:3])
    assert set(result["seconds_split"]) >= {"rollout", "reward", "old_logp", "update", "sync"}
    said = capsys.readouterr().out
    assert "prompts x 8 responses" in said and "curves.png" in said
    assert f"results in {tmp_path / 'learning'}\n" in said
    for name in ("config.json", "metrics.jsonl", "curves.png", "summary.json", "checkpoints"):
        assert (tmp_path / "learning" / name).exists()


def test_a_flipped_advantage_does_not_learn(tmp_path, monkeypatch):
    """The learning test can fail: the same run with the advantages' sign flipped ends below where
    it began."""
    advantages = grpo.advantages
    monkeypatch.setattr(grpo, "advantages", lambda rewards: -advantages(rewards))
    result = learn(tmp_path, grpo.main)
    assert result["greedy_after"] < result["greedy_before"] + 0.1

"""Whole runs: what they say, other families of models."""

import grpo
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from tests.helpers import SMALL, metrics, run_here

slow = pytest.mark.slow


def test_a_skipped_sync_stops_the_run(tmp_path, monkeypatch, capsys):
    """The sampler check in the loop itself: exit code 1 and one line with the usual causes."""
    monkeypatch.setattr("common.rollout.HFEngine.sync", lambda *arguments: None)
    flags = [*SMALL, "--steps", 20, "--lr", "3e-3", "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags) == 1
    assert "weights not synced" in capsys.readouterr().err


def test_an_idle_algorithm_is_said_loudly(tmp_path, capsys):
    """One mini-batch: the ratio never leaves 1 and nothing is clipped, which the run says."""
    flags = [*SMALL, "--steps", 1, "--minibatches", 1, "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags) == 0
    assert "WARNING: clip_share was 0 at every step" in capsys.readouterr().out


@slow
@pytest.mark.parametrize("words", ["--sample_every 0 --eval_every 1", "--sample_every 1"])
def test_evaluation_and_samples_change_nothing(words, tmp_path, finished):
    """Training does not depend on how often one evaluates or writes down samples."""
    flags = [*SMALL, "--steps", 4, *words.split(), "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags) == 0
    runs = [metrics(tmp_path / "run"), metrics(finished)]
    assert len(runs[0]) == 5 and ("greedy" in runs[0][1]) == ("eval" in words)
    for line in (*runs[0], *runs[1]):
        line.pop("greedy", None), line.pop("sampled", None)
    assert runs[0] == runs[1]
    assert (tmp_path / "run/samples.jsonl").exists() == ("sample_every 1" in words)


FAMILIES = {
    "Qwen2.5": (Qwen2Config, {"tie_word_embeddings": True}),
    "Llama": (LlamaConfig, {"tie_word_embeddings": False}),
}


@slow
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_train_and_save(family, tmp_path, monkeypatch, tiny):
    """An untrained model of each: one step, the sampler agrees, the saved model is the trained one,
    tied or not."""
    kind, more = FAMILIES[family]
    shape = {"vocab_size": 18, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(kind(pad_token_id=0, eos_token_id=1, **shape, **more))
    lm.save_pretrained(tmp_path / "model")
    tiny[1].save_pretrained(tmp_path / "model")
    flags = [*SMALL, "--model", tmp_path / "model", "--steps", 1, "--lr", 0.01, "--warmup", 1]
    flags += ["--save_hf", "--gradient_checkpointing", "--run_dir", tmp_path / "run"]
    # An untrained model is never right: reward odd lengths instead
    odd = lambda completion, answer: float(len(completion) % 2)  # noqa: E731
    monkeypatch.setattr("common.tiny.arithmetic.arithmetic_reward", odd)
    assert run_here(grpo.main, *flags) == 0
    line = metrics(tmp_path / "run")[-1]
    assert line["sampler_gap"] < 1e-4 and line["grad_norm"] > 0
    before = lm.state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").state_dict()
    assert before.keys() == after.keys()
    assert sum(not torch.equal(before[name], after[name]) for name in before) > len(before) // 2

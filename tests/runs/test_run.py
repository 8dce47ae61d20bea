"""Whole runs: what single files log, two ranks, other families of models."""

import json
import re
from pathlib import Path

import grpo
import minirl
import pytest
import stapo
import torch
from common.logprobs import Policy
from common.plumbing.model import load_model
from tools.evaluate import load_weights
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from tests.helpers import SMALL, command, metrics, module_of, run_here

pytestmark = pytest.mark.runs


@pytest.mark.parametrize("replay", ["r2", "r3"])
def test_routing_replay_in_the_loop(tmp_path, replay):
    """minirl on the mixture of experts: R3 leaves no token that sampler and trainer route
    differently, R2 some."""
    folder = tmp_path / "run"
    flags = [*SMALL, "--steps", 2, "--model", "tiny-moe", "--routing_replay", replay]
    assert run_here(minirl.main, *flags, "--run_dir", folder) == 0
    assert all((line["experts_differ"] == 0) == (replay == "r3") for line in metrics(folder)[1:])


@pytest.mark.parametrize(
    "words", ["ppo", "opd", "baselines --baseline none", "baselines --baseline batch"]
)
def test_a_group_of_one_where_nothing_is_compared(words, tmp_path):
    name, *flags = words.split()
    flags += [*SMALL, "--group_size", 1, "--steps", 2, "--run_dir", tmp_path / "run"]
    assert run_here(module_of(name).main, *flags) == 0
    assert [line["skipped"] for line in metrics(tmp_path / "run")[1:]] == [0, 0]


def test_the_end_says_that_groups_taught_nothing_and_what_to_run_next(tmp_path, capsys):
    """One token is never an answer: all rewards are 0. What is rounding noise is not on the bar."""
    flags = [*SMALL, "--max_new_tokens", 1, "--steps", 1, "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags) == 0
    said = capsys.readouterr()
    assert "in 100% of the groups all rewards were equal" in said.out
    assert said.out.endswith(f"python -m tools.page {tmp_path / 'run'}\n")
    assert "reward=0" in said.err and "sampler_kl" not in said.err and "clip_share" not in said.err


def test_stapo_writes_down_what_it_silenced(tmp_path):
    """As many examples as tokens counted, each with its context and below the threshold."""
    flags = [*SMALL, "--steps", 2, "--tau_p", 0.9, "--entropy_quantile", 1]
    assert run_here(stapo.main, *flags, "--run_dir", tmp_path / "run") == 0
    rows = [json.loads(line) for line in (tmp_path / "run/silenced.jsonl").read_text().splitlines()]
    assert len(rows) == sum(line["silenced"] for line in metrics(tmp_path / "run")[1:]) > 0
    assert all(row["prob"] < 0.9 and "=" in row["before"] and row["token"] for row in rows)


def samples(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_samples_show_a_run_and_change_nothing(tmp_path, capsys):
    """With groups of every step and with none the metrics are the same; the end shows one answer
    before and after; a default run stays below 2 MB even with the longest responses."""
    flags, runs = [*SMALL, "--steps", 3], {}
    for every in (1, 0):
        folder = tmp_path / str(every)
        assert run_here(grpo.main, *flags, "--sample_every", every, "--run_dir", folder) == 0
        runs[every], said = metrics(folder), capsys.readouterr().out
        assert ("\nbefore   " in said and "\nafter    " in said) == (every == 1)
    assert runs[0] == runs[1]
    assert not (tmp_path / "0/samples.jsonl").exists()
    rows = samples(tmp_path / "1")
    assert [row["step"] for row in rows if "example" in row] == [0, 2, 3]
    groups = [row for row in rows if "example" not in row]
    assert [(row["step"], row["minibatch"]) for row in groups] == [
        (step, part) for step in (1, 2, 3) for part in (1, 2)
    ]
    tokens = sum(len(one["ids"]) for row in groups for one in row["responses"])
    a = grpo.Args()
    steps = [
        s for s in range(1, a.steps + 1) if s == 1 or s % a.sample_every * (s % a.eval_every) == 0
    ]
    most = len(steps) * 2 * a.group_size * a.max_new_tokens  # tokens
    assert most * sum(map(len, map(json.dumps, groups))) / tokens < 2_000_000


def test_a_long_response_is_kept_at_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("common.plumbing.samples.LONGEST", 6)
    flags = [*SMALL, "--steps", 1, "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags) == 0
    kept = [one for row in samples(tmp_path / "run") for one in row.get("responses", ())]
    long = [one for one in kept if "left_out" in one]
    assert 0 < len(long) and all(len(one["ids"]) <= 6 for one in kept)
    for one in long:
        first, number = one["left_out"]
        assert first == 3 and all(len(one[name]) == 6 for name in ("tokens", "weight", "entropy"))
        assert one["text"].startswith("".join(one["tokens"][:3]))
        assert len(one["text"]) + one["finished"] == 6 + number  # the last token is <eos>


def test_an_idle_algorithm_is_said_loudly(tmp_path, capsys):
    """One mini-batch: the ratio never leaves 1 and nothing is clipped, which the run says."""
    flags = [*SMALL, "--steps", 1, "--minibatches", 1, "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags) == 0
    assert "WARNING: clip_share was 0 at every step" in capsys.readouterr().out


def test_a_skipped_sync_stops_the_run(tmp_path, monkeypatch, capsys):
    """The sampler check in the loop itself: exit code 1 and one line with the usual causes."""
    monkeypatch.setattr("common.rollout.HFEngine.sync", lambda *arguments: None)
    flags = [*SMALL, "--steps", 20, "--lr", "3e-3", "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags) == 1
    assert "weights not synced" in capsys.readouterr().err


def test_two_ranks_do_the_same_work(tmp_path, world):
    """Two gloo ranks: the same prompts, one run folder, resume too; one rank can read it."""
    for extra in (["--steps", 2], ["--steps", 4, "--resume"]):
        run = command("grpo", *SMALL, *extra, "--run_dir", tmp_path / "run", ranks=2)
        assert run.returncode == 0, run.stderr[-3000:]
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert re.search(r"2 rank\(s\) on cpu", run.stdout)
    assert run.stdout.count("held-out accuracy, greedy") == 1
    assert all(line["sampler_gap"] < 1e-4 for line in lines[1:])
    found = load_weights(tmp_path / "run", Policy(load_model("tiny")[0]))
    assert found == 4


FAMILIES = {
    "Qwen2.5": (Qwen2Config, {}),
    "Llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "SmolLM2": (LlamaConfig, {"tie_word_embeddings": True}),
    "Qwen3": (Qwen3Config, {"head_dim": 32}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_train_and_save(family, tmp_path, monkeypatch, tiny):
    """An untrained model of each: one step, the sampler agrees, the saved model is the trained one,
    tied or not."""
    kind, more = FAMILIES[family]
    shape = {"vocab_size": 18, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = kind(pad_token_id=0, eos_token_id=1, **shape, **more)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tiny[1].save_pretrained(tmp_path / "model")
    flags = [*SMALL, "--model", tmp_path / "model", "--steps", 1, "--lr", 0.01, "--warmup", 1]
    flags += ["--save_hf", "--gradient_checkpointing", "--run_dir", tmp_path / "run"]
    # An untrained model is never right: reward odd lengths instead
    judge = "common.data.arithmetic_reward"
    monkeypatch.setattr(judge, lambda completion, answer: float(len(completion) % 2))
    assert run_here(grpo.main, *flags) == 0
    line = metrics(tmp_path / "run")[-1]
    assert line["sampler_gap"] < 1e-4 and line["grad_norm"] > 0
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "model", tmp_path / "run/model")
    )
    assert before.keys() == after.keys()
    assert sum(not torch.equal(before[name], after[name]) for name in before) > len(before) // 2

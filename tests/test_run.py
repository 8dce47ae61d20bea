"""Whole runs: learning, resuming to the bit, stopping, and refusing bad input."""

import importlib.util
import json
import re
import shutil
import signal
import socket
import sys
from pathlib import Path

import grpo
import minirl
import pytest
import stapo
import torch
import torch.distributed as dist
from tools.evaluate import load_weights
from common.logprobs import Policy
from common.model import load_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from tests.adapters import ALGORITHMS
from tests.helpers import (
    MORE,
    ROOT,
    SMALL,
    assert_same_run,
    command,
    metrics,
    module_of,
    run_here,
    started,
)

pytestmark = pytest.mark.runs

# One update per batch, and none in the first eight steps; harder prompts
STEPS = {"vcpo": 35, "goldilocks": 20}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_resume_after_a_kill_is_bit_exact(algorithm, tmp_path):
    """6 steps at once, against 6 steps with a SIGKILL after the 5th (checkpoint at 4): weights,
    moments, metrics."""
    flags, main = [*SMALL, *MORE.get(algorithm, []), "--steps", 6], module_of(algorithm).main
    assert run_here(main, *flags, "--run_dir", tmp_path / "whole") == 0
    if algorithm == "grpo":  # one with an interpreter of its own, as a user has it
        words = ["grpo", "log", 5, *flags, "--run_dir", tmp_path / "parts"]
        killed = started("tests/driver.py", *words)
    else:
        killed = command(algorithm, *flags, "--run_dir", tmp_path / "parts", at=("log", 5))
    assert killed.returncode == -signal.SIGKILL
    assert [line["step"] for line in metrics(tmp_path / "parts")][-1] == 5
    assert run_here(main, *flags, "--run_dir", tmp_path / "parts", "--resume") == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 6, tmp_path)
    assert (tmp_path / "parts/summary.json").exists()
    names = sorted(path.name for path in (tmp_path / "parts/checkpoints").iterdir())
    assert names == ["step_000002", "step_000004", "step_000006"]


def test_a_kill_during_the_save_leaves_the_checkpoint_before(tmp_path, finished):
    """Killed between writing and renaming the second checkpoint: the first is loaded, the run ends
    as if not killed."""
    flags = [*SMALL, "--steps", 4, "--run_dir", tmp_path / "parts"]
    assert command("grpo", *flags, at=("save", 2)).returncode == -signal.SIGKILL
    names = sorted(path.name for path in (tmp_path / "parts/checkpoints").iterdir())
    assert names == ["partial", "step_000002"]
    assert run_here(grpo.main, *flags, "--resume") == 0
    assert_same_run(finished, tmp_path / "parts", 4, tmp_path)
    assert not (tmp_path / "parts/checkpoints/partial").exists()


@pytest.mark.parametrize("moment", ["term", "int", "hup"])
def test_signals_finish_the_step_save_and_exit_0(tmp_path, moment):
    """Ctrl-C in a real `python`, where the handlers stand from its first imports on."""
    flags = [*SMALL, "--steps", 50, "--run_dir", tmp_path / "run"]
    if moment == "int":
        run = started("tests/driver.py", "grpo", moment, 3, *flags)
    else:
        run = command("grpo", *flags, at=(moment, 3))
    assert run.returncode == 0, run.stderr[-2000:]
    assert "go on with --resume" in run.stdout and (tmp_path / "run/curves.png").exists()
    last = metrics(tmp_path / "run")[-1]["step"]
    assert last <= 5 and (tmp_path / f"run/checkpoints/step_{last:06d}").exists()


def test_the_last_checkpoints_are_kept(tmp_path):
    flags = [*SMALL, "--steps", 5, "--save_every", 1, "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags) == 0
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["step_000003", "step_000004", "step_000005"]


def test_earlier_results_are_moved_aside(tmp_path, capsys):
    flags = [*SMALL, "--steps", 1, "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags, "--seed", 1) == run_here(grpo.main, *flags) == 0
    assert "moved to" in capsys.readouterr().out
    assert (tmp_path / "run.1/summary.json").exists() and (tmp_path / "run/summary.json").exists()


def learn(tmp_path: Path, main, *flags: object) -> dict:
    folder = tmp_path / "learning"
    steps = STEPS.get(Path(sys.modules[main.__module__].__file__).stem, 16)
    measured = ["--eval_every", steps, "--eval_problems", 128, "--eval_samples", 1]
    flags = ["--steps", steps, *measured, "--run_dir", folder, *flags]
    assert run_here(main, *flags) == 0
    return json.loads((folder / "summary.json").read_text()) | {"metrics": metrics(folder)}


@pytest.mark.curves
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_short_run_learns(algorithm, tmp_path, capsys):
    """16 default steps: greedy from 0.34 to at least 0.85, longer responses, and the run folder is
    complete."""
    result = learn(tmp_path, module_of(algorithm).main)
    assert result["greedy_before"] < 0.5 and result["greedy_after"] > 0.85
    assert result["sampled_after"] > result["sampled_before"] + 0.08
    lengths = [line["response_len"] for line in result["metrics"][1:]]
    assert sum(lengths[-3:]) > 1.3 * sum(lengths[:3])
    assert set(result["seconds_split"]) >= {"rollout", "reward", "old_logp", "update", "sync"}
    said = capsys.readouterr().out
    assert "prompts x 8 responses" in said and "curves.png" in said and "metrics.jsonl" in said
    for name in ("config.json", "metrics.jsonl", "curves.png", "summary.json", "checkpoints"):
        assert (tmp_path / "learning" / name).exists()


def test_a_flipped_advantage_does_not_learn(tmp_path, monkeypatch):
    """The learning test can fail: the same run with the advantages' sign flipped ends below where
    it began."""
    advantages = grpo.advantages
    monkeypatch.setattr(grpo, "advantages", lambda rewards: -advantages(rewards))
    result = learn(tmp_path, grpo.main)
    assert result["greedy_after"] < result["greedy_before"] + 0.1


@pytest.mark.parametrize("replay", ["r2", "r3"])
def test_routing_replay_in_the_loop(tmp_path, replay):
    """minirl on the mixture of experts: R3 leaves no token that sampler and trainer route
    differently, R2 some."""
    folder = tmp_path / "run"
    flags = [*SMALL, "--steps", 2, "--model", "tiny-moe", "--routing_replay", replay]
    assert run_here(minirl.main, *flags, "--run_dir", folder) == 0
    assert all((line["experts_differ"] == 0) == (replay == "r3") for line in metrics(folder)[1:])


def test_stapo_writes_down_what_it_silenced(tmp_path):
    """As many examples as tokens counted, each with its context and below the threshold."""
    flags = [*SMALL, "--steps", 2, "--tau_p", 0.9, "--entropy_quantile", 1]
    assert run_here(stapo.main, *flags, "--run_dir", tmp_path / "run") == 0
    rows = [json.loads(line) for line in (tmp_path / "run/silenced.jsonl").read_text().splitlines()]
    assert len(rows) == sum(line["silenced"] for line in metrics(tmp_path / "run")[1:]) > 0
    assert all(row["prob"] < 0.9 and "=" in row["before"] and row["token"] for row in rows)


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


BAD_INPUT = {
    "unknown flag": (["--lerning_rate", 1], "--lerning_rate"),
    "not a number": (["--lr", "fast"], "Error parsing --lr: could not"),
    "unknown task": (["--task", "aritmetic"], "--task aritmetic: unknown"),
    "missing file": (["--task", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    "malformed row": (["--task", "BAD_ROWS"], "bad.jsonl:2: not a JSON object"),
    "no such model": (["--model", "nowhere/nothing"], "--model nowhere/nothing"),
    "model without weights": (["--model", "EMPTY_MODEL"], "weights"),
    "a group of one": (["--group_size", 1], "--group_size 1"),
    "mini-batches do not divide": (["--minibatches", 5], "--prompts_per_step 16"),
    "zero steps": (["--steps", 0], "--steps 0: must be 1 or more"),
    "zero temperature": (["--temperature", 0], "--temperature 0.0"),
    "no wandb": (["--wandb", "project"], "--wandb project: needs the package"),
    "unknown engine": (
        ["--rollout", "sglang"],
        "error: invalid choice 'sglang' for argument '--rollout'. Expected",
    ),
    # So long that it starts a line of tyro's box
    "unknown flag of a line": (["--" + "x" * 70], " --" + "x" * 70),
    "unknown precision": (
        ["--dtype", "float7"],
        "error: invalid choice 'float7' for argument '--dtype'. Expected",
    ),
    "nothing to resume": (["--resume"], "--resume: no run in"),
}


def test_routing_replay_needs_experts(tmp_path, capsys):
    assert run_here(minirl.main, "--routing_replay", "r3", "--run_dir", tmp_path / "run") == 2
    assert "tiny has no experts" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_line_exit_2_and_nothing_written(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.json").write_text("{}")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1", "answer": 2}\noops\n')
    before = sorted(tmp_path.rglob("*"))
    places = {"BAD_ROWS": tmp_path / "bad.jsonl", "EMPTY_MODEL": tmp_path / "empty"}
    if name == "no wandb":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    flags, message = BAD_INPUT[name]
    code = run_here(
        grpo.main, *(places.get(flag, flag) for flag in flags), "--run_dir", tmp_path / "run"
    )
    said = capsys.readouterr().err.splitlines()
    assert code == 2 and len(said) == 1, said
    assert message in said[0] and said[0].startswith("grpo.py: error: ")
    assert sorted(tmp_path.rglob("*")) == before


OUT_OF_RANGE = [
    ("grpo", "--beta -1", "--beta -1.0: must be 0 or more"),
    ("grpo", "--beta nan", "--beta nan: must be 0 or more"),
    ("grpo", "--clip_low -0.5", "--clip_low -0.5: must be 0 or more"),
    ("grpo", "--clip_high 1e39", "--clip_high 1e+39: is too large"),
    ("grpo", "--lr inf", "--lr inf: is too large"),
    ("grpo", "--weight_decay -1", "--weight_decay -1.0: must be 0 or more"),
    ("grpo", "--temperature 1e-40", "--temperature 1e-40: must be from 0.01 to 100"),
    ("grpo", "--betas 0.9 1", "--betas 1.0: must be from 0 to below 1"),
    ("grpo", "--warmup -5", "--warmup -5: must be 0 or more"),
    ("grpo", "--warmup 1" + 400 * "0", "is too large"),
    ("grpo", "--seed 100000000000000000000000", "is too large"),
    ("grpo", "--group_size 100000000000000000000", "is too large"),
    ("grpo", "--vllm_memory 30", "--vllm_memory 30.0: must be above 0 and at most 1"),
    ("grpo", "--sampler_tolerance -1", "--sampler_tolerance -1.0: must be 0 or more"),
    ("grpo", "--eval_problems 1000000000", "--eval_problems 1000000000: at most"),
    ("gspo", "--clip_low -1", "--clip_low -1.0: must be 0 or more"),
    ("sapo", "--tau_neg 0", "--tau_neg 0.0: must be a number above 0"),
    ("stapo", "--entropy_quantile 80", "--entropy_quantile 80.0: must be from 0 to 1"),
    ("maspo", "--sigma_base 1e308", "is too large"),
    ("minirl", "--is_cap 0", "--is_cap 0.0: must be a number above 0"),
    ("minirl", "--routing_replay r2", "tiny has no experts"),
    ("vcpo", "--rho_on 0", "--rho_on 0.0: must be a number above 0"),
    ("vcpo", "--lag 0 --async", "--lag 0: must be 1 or more, and below --steps 150"),
    ("goldilocks", "--explore 2", "--explore 2.0: must be from 0 to 1"),
    (
        "goldilocks",
        "--teacher_batch 4096",
        "--teacher_batch 4096: must be a multiple of the 1 ranks, and at most --window",
    ),
    ("goldilocks", "--teacher nowhere", "--teacher 'nowhere': no such folder"),
    ("deep_grpo", "--branches 1", "--branches 1: must be 2 or more"),
    ("deep_grpo", "--boundary z", "--boundary 'z': no token ends in it"),
    ("deep_grpo", "--depth_power 1e30", "--depth_power 1e+30: must be from 0 to 100"),
]


@pytest.mark.parametrize(
    ("algorithm", "flags", "message"),
    OUT_OF_RANGE,
    ids=[" ".join(x[:2])[:40] for x in OUT_OF_RANGE],
)
def test_every_file_checks_its_own_flags(algorithm, flags, message, tmp_path, capsys):
    main = module_of(algorithm).main
    assert run_here(main, *flags.split(), "--run_dir", tmp_path / "run") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert message in said and not (tmp_path / "run").exists()


ENVIRONMENT = [
    ({"OMP_NUM_THREADS": "abc"}, 2, "OMP_NUM_THREADS=abc in the environment"),
    ({"RANK": "x"}, 2, "RANK=x in the environment"),
    ({"RANK": "-1"}, 2, "RANK=-1 in the environment"),
    (
        {"RANK": "5", "WORLD_SIZE": "2"},
        2,
        "RANK=5 in the environment: must be a number from 0 to 1",
    ),
    ({"WORLD_SIZE": "0"}, 2, "WORLD_SIZE=0 in the environment: must be a number from 1"),
    ({"WORLD_SIZE": "2"}, 2, "no MASTER_PORT: start several ranks with torchrun"),
    ({"MASTER_PORT": "99999"}, 2, "MASTER_PORT=99999 in the environment"),
    ({"MASTER_PORT": "BUSY"}, 1, "ranks cannot meet at 127.0.0.1:"),
    ({"OMP_NUM_THREADS": "1,2", "LOCAL_RANK": ""}, 0, ""),  # a list for OpenMP's levels; unset
]


@pytest.mark.parametrize(
    ("variables", "code", "message"), ENVIRONMENT, ids=[str(case[0]) for case in ENVIRONMENT]
)
def test_a_wrong_environment_is_one_line(variables, code, message, tmp_path, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        for name, value in variables.items():
            monkeypatch.setenv(name, value.replace("BUSY", str(busy.getsockname()[1])))
        assert run_here(grpo.main, *SMALL, "--steps", 1, "--run_dir", tmp_path / "run") == code
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if "error: " in line or "Traceback" in line]
    assert len(said) == bool(code) and (not code or message in said[0])
    assert (tmp_path / "run").exists() == (code == 0)


@pytest.mark.skipif(bool(importlib.util.find_spec("vllm")), reason="vLLM is installed")
def test_without_vllm_its_install_line_is_shown(tmp_path, capsys):
    assert run_here(grpo.main, "--rollout", "vllm", "--run_dir", tmp_path / "run") == 2
    assert "pip install -r requirements.txt), or use --rollout hf" in capsys.readouterr().err


def test_exit_code_and_line_of_the_real_command(capsys):
    run = started("grpo.py", "--nope", 1)
    assert run.returncode == 2 and "--nope" in run.stderr
    assert run.stderr.count("\n") == 1 and not run.stdout
    assert run_here(grpo.main, "--help") == 0
    assert "--clip_low" in capsys.readouterr().out


def test_resume_refuses_another_run(tmp_path, monkeypatch, capsys):
    """Another algorithm, other shapes, another number of ranks: named, and the folder stays as it
    was."""
    folder = tmp_path / "run"
    flags = [*SMALL, "--steps", 2, "--run_dir", tmp_path / "run", "--resume"]
    assert run_here(grpo.main, *flags[:-1]) == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def refused(*extra: object) -> str:
        capsys.readouterr()
        assert run_here(grpo.main, *flags, *extra) == 2
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        return capsys.readouterr().err

    assert "has group_size 4, this run 8" in refused("--group_size", 8)
    config = json.loads((folder / "config.json").read_text())
    # The evaluation set decides which rows of a set are held back from training.
    changes = {"algorithm": "gspo", "ranks": 2, "eval_task": "math500"}
    for change, message in (
        ({name: value}, f"has {name} {value!r}, this run") for name, value in changes.items()
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        before[folder / "config.json"] = (folder / "config.json").read_bytes()
        assert message in refused()
    (folder / "config.json").write_text(json.dumps(config))
    before[folder / "config.json"] = (folder / "config.json").read_bytes()
    # A model of other shapes behind the same name: here the embedded one with a narrower MLP.
    other = tmp_path / "model"
    shutil.copytree(ROOT / "common/tiny/model", other)
    resized(other)
    monkeypatch.setattr("common.model.EMBEDDED", {"tiny": other})
    assert "does not fit --model (Size mismatch" in refused()
    assert not dist.is_initialized()


def resized(folder: Path) -> None:
    """Rewrite a model folder with another MLP width."""
    from transformers import AutoConfig, Qwen3ForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.intermediate_size = 96
    (folder / "model.safetensors").unlink()
    Qwen3ForCausalLM(config).save_pretrained(folder)


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
    found = load_weights(tmp_path / "run/checkpoints", Policy(load_model("tiny")[0]), world, "")
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

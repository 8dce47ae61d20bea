"""Bad input, in flags, files and environment: one line, exit code 2, and nothing written."""

import importlib
import importlib.util
import socket

import grpo
import pytest
from transformers import Qwen3Config

from tests.helpers import SMALL, module_of, run_here, started


BAD_INPUT = {
    "unknown flag": (["--lerning_rate", 1], "--lerning_rate"),
    "not a number": (["--lr", "fast"], "Error parsing --lr: could not"),
    "unknown task": (["--task", "aritmetic"], "--task aritmetic: unknown"),
    "missing file": (["--task", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    "malformed row": (["--task", "BAD_ROWS"], "bad.jsonl:2: needs 'prompt'"),
    # Not taken for the library of that name, which says when another rank is lost
    "a file called igloo": (["--task", "igloo.jsonl"], "--task igloo.jsonl: no such file"),
    "no such model": (["--model", "nowhere/nothing"], "--model nowhere/nothing"),
    "model without weights": (["--model", "EMPTY_MODEL"], "holds no *.safetensors weights"),
    "the embedded model's defaults": (
        ["--model", "BIG_MODEL"],
        "give --lr (usual in full fine-tuning: 1e-6 for billions of parameters, 1e-5 for some "
        "100 million) and --max_new_tokens (usual: 512 to 4096)",
    ),
    "its lr": (["--model", "BIG_MODEL", "--max-new-tokens=9"], "model's; give --lr (usual"),
    "its length": (["--model", "BIG_MODEL", "--lr", 1], "model's; give --max_new_tokens (usual"),
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
    "nothing to resume": (["--resume"], "--resume: no checkpoint in"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_line_exit_2_and_nothing_written(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.json").write_text("{}")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1", "answer": 2}\noops\n')
    Qwen3Config(hidden_size=1024, num_hidden_layers=1).save_pretrained(tmp_path / "big")
    (tmp_path / "big/model.safetensors").touch()  # not read: config.json says how large it is
    before = sorted(tmp_path.rglob("*"))
    places = {"BAD_ROWS": tmp_path / "bad.jsonl", "EMPTY_MODEL": tmp_path / "empty"}
    places["BIG_MODEL"] = tmp_path / "big"
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
    ("minirl", "--routing_replay r3", "tiny has no experts"),
    ("icepop", "--correction_level sequence", "--correction_level sequence: is for tis and mis"),
    ("icepop", "--w_low 6", "--w_low 6.0, --w_high 5.0: 1 must lie between them"),
    ("icepop", "--w_low 2 --w_high 3", "--w_low 2.0, --w_high 3.0: 1 must lie between them"),
    ("opd", "--group_size 1 --reward_weight 1", "--group_size 1: a group needs 2 responses"),
    ("baselines", "--group_size 1", "--group_size 1: a group needs 2 responses to compare"),
    ("opd", "--teacher nowhere", "--teacher 'nowhere': no such folder"),
    ("laconic", "--price_floor 1", "--price_ceiling 0.3: below price_floor or above 1e6"),
    ("ppo", "--lam 1.5", "--lam 1.5: must be from 0 to 1"),
    ("ppo", "--gamma 0", "--gamma 0.0: must be above 0 and at most 1"),
    ("laconic", "--price_ceiling 1e7", "--price_ceiling 10000000.0: below"),
    ("dapo", "--overlong_buffer 65", "--overlong_buffer 65: is above --max_new_tokens 64"),
    ("blockwise", "--marker Z", "--marker Z: this model's tokenizer cannot write it ("),
    ("blockwise", "--marker <eos>", "--marker <eos>: must be one token of this model"),
    ("blockwise", "--marker 12", "--marker 12: must be one token of this model"),
    ("vcpo", "--rho_on 0", "--rho_on 0.0: must be a number above 0"),
    ("vcpo", "--lag 0 --async", "--lag 0: must be 1 or more, and below --steps 150"),
    ("vcpo", "--lag -1", "--lag -1: must be"),
    ("vcpo", "--lag 8 --steps 8", "--lag 8: must be"),
    ("vcpo", "--async --vllm_sleep", "--async: not together"),
    ("vcpo", "--async --tensor_parallel 2", "--async: not together"),
    ("goldilocks", "--explore 2", "--explore 2.0: must be from 0 to 1"),
    (
        "goldilocks",
        "--teacher_batch 4096",
        "--teacher_batch 4096: must be a multiple of the 1 ranks, and at most --window",
    ),
    ("goldilocks", "--candidates 0", "--candidates 0"),
    ("goldilocks", "--teacher_batch 64 --window 32", "--teacher_batch 64"),
    ("goldilocks", "--teacher nowhere", "--teacher 'nowhere': no such folder"),
    ("deep_grpo", "--branches 1", "--branches 1: must be 2 or more"),
    ("deep_grpo", "--boundary z", "--boundary 'z': no token ends in it"),
    ("deep_grpo", "--boundary @", "--boundary '@': no token ends in it"),
    ("deep_grpo", "--depth_power 1e3", "--depth_power 1000.0: must be from 0 to 100"),
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
    ({"WORLD_SIZE": "2"}, 2, "no MASTER_PORT: start several ranks with torchrun"),
    ({"MASTER_PORT": "99999"}, 2, "the ranks cannot be set up (port must have value"),
    ({"MASTER_PORT": "BUSY"}, 2, "the ranks cannot be set up ("),
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
    assert "pip install -r requirements.txt, or use --rollout hf" in capsys.readouterr().err


def test_exit_code_and_line_of_the_real_command(capsys):
    run = started("grpo.py", "--nope", 1)
    assert run.returncode == 2 and "--nope" in run.stderr
    assert run.stderr.count("\n") == 1 and not run.stdout
    assert run_here(grpo.main, "--help") == 0
    assert "--clip_low" in capsys.readouterr().out

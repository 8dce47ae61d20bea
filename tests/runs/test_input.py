"""Bad input in flags, files and environment gives one line and exit code 2, and writes nothing."""

import io
import shutil
import sys
from pathlib import Path

import grpo
import pytest
from checks import run_of
from checks.files import ALGORITHMS
from common.launch import parse
from transformers import Qwen3Config

from tests.helpers import SMALL, metrics, module_of, run_here, small

# What is in a folder of the test stands for its name
BAD_INPUT = [
    ("grpo", "--task nowhere.jsonl", "nowhere.jsonl: no such file"),
    ("grpo", "--task nowhere.py", "--task nowhere.py: cannot be read"),
    ("grpo", "--model some/typo", "some/typo: no such folder, and as a hub name neither cached"),
    ("grpo", "--model=~/nowhere", f"--model '{Path.home()}/nowhere': no such folder"),
    ("grpo", "--model empty", "--model empty: cannot be loaded (Unrecognized model in empty"),
    ("grpo", "--model twice", "twice: holds model.safetensors and model.safetensors.index.json"),
    ("grpo", "--rollout vllm", "--rollout vllm: pip install"),
    # The embedded model's defaults would train another model silently wrong
    ("grpo", "--model big", "give --lr (usual in full fine-tuning: 1e-6 for billions of"),
    ("grpo", "--group_size 1", "--group_size 1"),
    ("grpo", "--minibatches 5", "--prompts_per_step 16"),
    ("grpo", "--beta nan", "--beta nan: must be 0 or more"),
    ("grpo", "--lr inf", "--lr inf: must be a number above 0, and finite"),
    ("grpo", "--seed 12345678901234567890123", "must be from 0 to 4294967295"),
    ("grpo", "--shard_ranks 2", "--shard_ranks 2: does not divide the 1 rank(s)"),
    ("grpo", "--resume", "--resume: no checkpoint in"),
    ("grpo", "--lerning_rate 1", "--lerning_rate"),  # said by tyro
]
# Each kind of limit, and what a file checks of its own (its `RUN` in checks)
OWN_FLAGS = [
    ("grpo", "--temperature 1e-40", "--temperature 1e-40: must be from 0.01 to 100"),
    ("grpo", "--lr -0", "--lr -0.0: must be a number above 0"),
    ("grpo", f"--group_size 1{'0' * 30}", "must be from 1 to 4294967295"),
    ("grpo", "--vllm_memory 30", "--vllm_memory 30.0: must be above 0 and at most 1"),
]
OWN_FLAGS += [(name, *case) for name in ALGORITHMS for case in run_of(name).refuses]
CASES = [*BAD_INPUT, *(pytest.param(*case, marks=pytest.mark.slow) for case in OWN_FLAGS)]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("input")
    (folder / "empty").mkdir()
    (folder / "empty/config.json").write_text("{}")
    (folder / "twice").mkdir()
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (folder / "twice" / name).touch()
    (folder / "task.py").touch()
    Qwen3Config(hidden_size=1024, num_hidden_layers=1).save_pretrained(folder / "big")
    (folder / "big/model.safetensors").touch()  # not read: config.json says how large it is
    return folder


@pytest.mark.parametrize(("algorithm", "flags", "message"), CASES)
def test_bad_input_is_one_line(algorithm, flags, message, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(files)
    before = sorted(files.rglob("*"))
    words = [*flags.split(), "--run_dir", tmp_path / "run"]
    assert run_here(module_of(algorithm).main, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and line.startswith("grpo.py: error: ")
    assert not list(tmp_path.iterdir()) and sorted(files.rglob("*")) == before


def test_ranks_that_cannot_meet(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    assert run_here(grpo.main, *SMALL, "--run_dir", tmp_path / "run") == 2
    message = capsys.readouterr().err
    assert "cannot join the others" in message and message.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_task_of_slurm_says_that_it_is_alone_on_any_terminal(monkeypatch):
    """An ASCII terminal shows the letters of --help that it lacks as codes."""
    screen = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert run_here(grpo.main, "--help") == 0
    screen.flush()
    shown = screen.buffer.getvalue()
    assert shown.startswith(b"SLURM_NTASKS is not 1") and b"\\u03c0" in shown  # π


CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MESSAGES = """
def train(i):
    return [{"role": "user", "content": f"{i} + 1?"}], str(i + 1)

held_out = [train(i) for i in range(9)]
reward = lambda response, answer: len(response) % 2
reply = lambda response, answer: None
"""
QUICK = ["grpo", "goldilocks"]
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS if name not in QUICK]


@pytest.mark.parametrize("algorithm", [*QUICK, *OTHERS])
def test_prompts_may_be_chat_messages(algorithm, words, tmp_path):
    """Every file reads the prompt of a problem as a text or as a list of messages."""
    model = Path(shutil.copytree(words, tmp_path / "model"))
    (model / "chat_template.jinja").write_text(CHAT)
    (tmp_path / "chats.py").write_text(MESSAGES)
    own = run_of(algorithm).of_words.replace("MODEL", str(model)).split()
    flags = [*small(algorithm), *own, "--max_new_tokens", 24]
    flags += ["--steps", 2, "--lr", 1e-4, "--model", model, "--task", tmp_path / "chats.py"]
    assert run_here(module_of(algorithm).main, *flags, "--run_dir", tmp_path / "run") == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]


RESUMES = {"": "yes", "yes": "yes", "no": "no", "auto": "auto"}


@pytest.mark.parametrize("value", RESUMES)
def test_resume_without_a_word_means_yes(value, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--resume", *value.split(), "--steps", "4"])
    args = parse(grpo.Args)
    assert args.resume == RESUMES[value] and args.steps == 4

"""Shared fixtures. The files under test are imported from the repository's root."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import common  # noqa: E402, F401  (before torch)
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common.distributed import setup  # noqa: E402
from common.model import load_model  # noqa: E402
from gpu.shapes import byte_tokenizer  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture
def world():
    """A process group of one, as plain `python grpo.py` makes it."""
    world = setup()
    yield world
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def tiny():
    """(model, tokenizer): never changed by a test."""
    return load_model("tiny")


@pytest.fixture(scope="session")
def words(tmp_path_factory):
    """A folder with an untrained model that reads and writes any text, a token per byte."""
    folder = tmp_path_factory.mktemp("words")
    byte_tokenizer(258).save_pretrained(folder)
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "head_dim": 32,
        "vocab_size": 258,
    }
    heads = {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads, tie_word_embeddings=True)).save_pretrained(
        folder
    )
    return folder


@pytest.fixture
def command(tmp_path):
    """Run a Python command line from the repository's root as a user would; returns the finished
    process."""

    def run(*words: object, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run

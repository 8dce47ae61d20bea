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


@pytest.fixture
def command(tmp_path):
    """Run a Python command line from the repository's root as a user would; returns the finished process."""

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

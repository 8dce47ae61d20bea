"""Shared fixtures."""

import os
from pathlib import Path

import pytest

# On a machine with GPUs too the suite is the CPU's: what needs one is in tests/gpu.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

import grpo
import torch
import torch.distributed as dist
from common.distributed import setup
from common.model import load_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.helpers import SMALL, run_here

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_curves(request, monkeypatch):
    """Draw a run's curves only in tests marked `curves`, because it takes longer than the runs."""

    def no_curves(folder: Path, config: dict) -> Path:
        (folder / "curves.png").touch()
        return folder / "curves.png"

    if "curves" not in request.keywords:
        monkeypatch.setattr("common.run.draw_run", no_curves)


@pytest.fixture
def world():
    """Make a process group of one, as plain `python grpo.py` does."""
    world = setup()
    yield world
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def tiny():
    """Return (model, tokenizer), which no test may change."""
    return load_model("tiny")


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Return the folder of a run of four steps, with checkpoints at 2 and 4, to read or copy."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert run_here(grpo.main, *SMALL, "--steps", 4, "--run_dir", folder) == 0
    return folder


@pytest.fixture(scope="session")
def words(tmp_path_factory):
    """Return a folder with an untrained model of any text, one token per byte."""
    folder = tmp_path_factory.mktemp("words")
    vocabulary = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    ids = {word: i for i, word in enumerate(vocabulary)}
    core = Tokenizer(models.BPE(vocab=ids, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    marks = {"pad_token": "<pad>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=core, **marks).save_pretrained(folder)
    shape = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 32, "vocab_size": 258}
    shape |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    shape |= {"pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True}
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)
    return folder

"""Norms of single responses' gradients in one pass, against autograd on one response at a time."""

import copy
from types import SimpleNamespace

import common.scale.norms
import pytest
import torch
import vcpo
from common.batch import Rollout
from common.distributed import World, clip_gradients, shard
from common.logprobs import Policy, gradient_norms, response_logprobs
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from tests.helpers import SMALL, packed, run_here

V, TEMPERATURE = 23, 0.7
ARGS = SimpleNamespace(temperature=TEMPERATURE, micro_tokens=200)
SHAPE = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15}
SHAPE |= {"max_position_embeddings": 256, "pad_token_id": 0}
MODELS = {
    "Qwen3, q/k norms, tied": Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True),
    "Qwen3, untied": Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=False),
    "Qwen2, q/k/v biases, tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "Llama, biases everywhere": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
}


def model(name: str) -> torch.nn.Module:
    """Return an untrained model in which every parameter, norms and biases included, is random."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(MODELS[name], attn_implementation="sdpa").eval()
        for parameter in lm.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return lm


def responses(seed: int = 0, n: int = 9, longest: int = 40) -> Rollout:
    """Return rows of unequal lengths, with tokens that repeat, and <pad> inside some."""
    generator = torch.Generator().manual_seed(seed)

    def ids(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most, (), generator=generator))
        return torch.randint(0, V, (length,), generator=generator).tolist()

    return packed([ids(2, 9) for _ in range(n)], [ids(1, longest) for _ in range(n)])


def separately(lm: torch.nn.Module, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return Σ log π and |∇ Σ log π| of each response, from the model's logits in float64."""
    lm, sums, norms = copy.deepcopy(lm).double(), [], []
    for row, start, end in zip(batch.sequences, batch.prompt_len.tolist(), batch.ends.tolist()):
        logits = lm(row[None, :end]).logits[0, start - 1 : end - 1] / TEMPERATURE  # [T, V]
        logp = logits.log_softmax(-1).gather(1, row[start:end, None]).sum()
        gradient = torch.autograd.grad(logp, list(lm.parameters()), allow_unused=True)
        parts = [part.flatten() for part in gradient if part is not None]
        sums.append(logp.detach())
        norms.append(torch.cat(parts).norm())
    return torch.stack(sums), torch.stack(norms)


def check(name: str, world: World, **how: object) -> None:
    """Check that `gradient_norms` gives what separate passes give."""
    lm, batch = model(name), responses(**how)
    logp, norms = gradient_norms(Policy(lm), batch, ARGS, world)
    sums, expected = separately(lm, batch)
    assert torch.allclose(logp.sum(1).double(), sums, rtol=1e-4)
    assert ((norms - expected).abs() < 1e-5 * expected).all()
    assert expected.max() > 2 * expected.min()


@pytest.mark.parametrize("name", MODELS)
def test_norms_are_those_of_separate_passes(world, name):
    """Micro-batches are padded, and of several sizes."""
    assert not common.scale.norms.unsupported_module(Policy(model(name)))
    check(name, world)


@pytest.mark.slow
def test_either_side_of_a_linear_map(world, monkeypatch):
    """Short responses are computed by pairs of places, long ones by the gradient itself; for a
    large vocabulary one response, and one token of it, at a time."""
    for longest in (5, 120):
        check("Qwen2, q/k/v biases, tied", world, longest=longest)
    monkeypatch.setattr(common.scale.norms, "BLOCK_ELEMENTS", 1)
    check("Qwen3, q/k norms, tied", world, longest=60)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.02)])
def test_sharded_and_recomputed(world, dtype, tolerance):
    """As on GPUs, FSDP2 casts down (0.7% off was seen), and layers that are run again in the
    backward pass are counted once."""
    batch, args = responses(), vcpo.Args(dtype=dtype, gradient_checkpointing=True)
    policy = shard(Policy(model("Qwen2, q/k/v biases, tied")), args, world, offload=True)
    _, norms = gradient_norms(policy, batch, ARGS, world)
    for i, norm in enumerate(norms.tolist()):
        response_logprobs(policy, batch.rows(slice(i, i + 1)), TEMPERATURE)[0].sum().backward()
        alone = clip_gradients(policy, float("inf"))  # measures and does not clip
        policy.zero_grad()
        assert norm == pytest.approx(alone, rel=tolerance)


def test_nothing_is_left_behind(world):
    """No gradient and no hook stays, and an empty batch is possible."""
    policy, batch = Policy(model("Qwen3, q/k norms, tied")), responses()
    gradient_norms(policy, batch, ARGS, world)
    assert all(p.grad is None for p in policy.parameters())
    assert not any(m._forward_hooks for m in policy.modules())
    logp, norms = gradient_norms(policy, batch.rows(slice(0, 0)), ARGS, world)
    assert logp.shape == (0, batch.mask.shape[1]) and norms.shape == (0,)


@pytest.mark.slow
def test_a_model_with_other_parts_is_refused(tmp_path, capsys):
    """No norm is guessed, for example of a mixture of experts."""
    flags = [*SMALL, "--model", "tiny-moe", "--run_dir", tmp_path / "run"]
    assert run_here(vcpo.main, *flags) == 2
    assert "Qwen3MoeExperts: no gradient norms" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

"""What runs only on GPUs, as far as it can be tested without one.

tests/gpu checks whether the kernels do what they should; vLLM itself is in test_vllm.py.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common.logprobs import Policy
from common.scale.head import add_product, head_product
from common.scale.vllm import VLLMEngine, checkpoint_tensors
from transformers import AutoConfig, AutoModelForCausalLM

from tests.gpu import check

pytestmark = pytest.mark.slow


class Sampler:
    """vLLM's LLM, as far as `generate` knows it. Each answer is the prompt's last token and EOS."""

    def __init__(self, experts: type):
        self.experts, self.seeds = experts, []

    def generate(self, requests: list[dict], sampling: list, use_tqdm: bool) -> list:
        answers, logps = [], SimpleNamespace(logprobs=[-0.5, -0.25])
        for request, how in zip(requests, sampling):
            prompt = request["prompt_token_ids"]
            output = SimpleNamespace(token_ids=[prompt[-1], 1], logprobs=logps)
            # The last token is never fed back.
            output.routed_experts = np.ones((len(prompt) + 1, 2, 2), self.experts)
            answers.append(SimpleNamespace(outputs=[output] * how.n))
            self.seeds += range(how.seed, how.seed + how.n)
        return answers


@pytest.mark.parametrize(("theirs", "ours"), [(np.uint8, torch.uint8), (np.uint16, torch.int16)])
def test_what_a_rollout_is_made_of(world, theirs, ours):
    """Prefixes belong to the response. Experts are reported for every token but the last, also if
    there are more than 256. Each response has its own seed, and the next call has other seeds."""
    engine = SimpleNamespace(calls=0, seed=7, top=0, eos=[1], world=world, group=None)
    engine.reports_experts = True
    engine.llm, engine.SamplingParams = Sampler(theirs), SimpleNamespace
    engine._wake, engine._sleep = lambda *parts: None, lambda: None
    for _ in range(2):
        batch = VLLMEngine.generate(engine, [[5, 6], [7]], 3, 8, 1.0, [[], [8]])
    assert len(set(engine.llm.seeds)) == len(engine.llm.seeds) == 12
    rows = batch.response_ids()
    assert rows[0] == [6, 1] and rows[3] == [8, 8, 1] and len(rows) == 6
    assert batch.mask.sum() == 12 and batch.rollout_logp[3].tolist() == [-0.5, -0.25]
    assert batch.sampler_experts.dtype == ours
    assert batch.sampler_experts[[0, 3], :, 0, 0].tolist() == [[1, 1, 1, 0]] * 2


def test_a_push_has_the_names_of_published_checkpoints():
    """Routers' biases are pushed in float32: rounded they would choose other experts."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 99}
    config = AutoConfig.for_model("minimax_m2", **sizes, num_local_experts=4)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    tensors = dict(checkpoint_tensors(Policy(lm), torch.bfloat16))
    block = "model.layers.0.block_sparse_moe"
    for i in range(4):
        assert tensors[f"{block}.experts.{i}.w3.weight"].shape == (96, 64)
        assert tensors[f"{block}.experts.{i}.w2.weight"].dtype == torch.bfloat16
    assert tensors[f"{block}.e_score_correction_bias"].dtype == torch.float32


def test_the_heads_products_are_float32(monkeypatch):
    """On a GPU by the kernel's own output type: after a rounding to bfloat16 it is too late."""
    dtypes = []
    monkeypatch.setattr(torch, "mm", lambda *args, out_dtype: dtypes.append(out_dtype) or args[0])
    monkeypatch.setattr(torch, "addmm", lambda *args, out_dtype, out: dtypes.append(out_dtype))
    left, right = torch.ones(4, 2).bfloat16(), torch.ones(2, 3).bfloat16()
    there = {"is_cuda": True, "dtype": torch.bfloat16, "shape": torch.Size([4, 1, 2])}
    there = SimpleNamespace(flatten=lambda start, end: left, **there)
    assert head_product(there, right.T).shape == (4, 1, 2)
    add_product(torch.ones(4, 3), there, right)
    assert dtypes == [torch.float32] * 2
    assert head_product(left, right.T).dtype == torch.float32  # on a CPU


def test_the_gpus_checks_run(capsys):
    """tests/gpu/check.py must run on the day when there is a GPU."""
    assert check.main(["gradients", "resume", "memory", "offload", "nothing"]) == 1
    verdicts = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert verdicts == ["ok", "ok", "ok", "ok", "wrong"]

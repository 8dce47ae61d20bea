"""--compile: few graphs, the numbers of uncompiled layers, and a run goes on where it fails.

All but one test compile with "aot_eager": it traces and differentiates as for a compiler, but
computes with the usual kernels. So results are equal to the bit.
"""

import copy
import random
from collections.abc import Callable
from functools import partial

import common.logprobs
import grpo
import pytest
import torch
from common.batch import Rollout
from common.distributed import Compiled, World, shard, whole_tensor
from common.logprobs import Policy, d_product, read_block, response_logprobs
from common.model import load_model
from common.norms import gradient_norms
from torch._dynamo.utils import counters

from tests.helpers import SMALL, assert_same_run, command, drive, forked, run_here

# torch warns of what it cannot compile for CPUs: products grouped by experts
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def compile_with(monkeypatch) -> Callable:
    """Sets the backend of torch.compile, with nothing compiled before."""

    def set_backend(backend: str | Callable) -> None:
        torch._dynamo.reset()
        counters.clear()
        monkeypatch.setattr(Compiled, "failed", False)
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
        for function in (read_block, d_product):
            name = f"compiled_{function.__name__}"
            monkeypatch.setattr(common.logprobs, name, Compiled(function))

    return set_backend


def batches(count: int) -> list[Rollout]:
    """Random tokens in shapes as micro-batches have them; every seventh is one row."""
    numbers, made = random.Random(0), []
    for i in range(count):
        rows = 1 if i % 7 == 6 else numbers.randint(2, 19)
        lengths = [numbers.randint(5, 90) for _ in range(rows)]
        tokens = [[numbers.randrange(2, 18) for _ in range(length)] for length in lengths]
        prompts = [tokens[0][: numbers.randint(2, 10)] for _ in tokens]
        blank = [[0.0] * len(row) for row in tokens]
        made.append(
            Rollout.pack(prompts=prompts, tokens=tokens, logps=blank, eos=[1], device="cpu")
        )
    return made


def policies(world: World, model: str = "tiny", offload: bool = False, **flags: object) -> list:
    """The same policy, uncompiled and compiled."""
    lm, _ = load_model(model)
    flags = {"dtype": "float32"} | flags
    args = [grpo.Args(compile=how, **flags) for how in ("off", "on")]
    return [shard(Policy(copy.deepcopy(lm)), one, world, offload) for one in args]


def step(policy: Policy, batch: Rollout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, entropies, and the gradient of the sum of the log-probs."""
    logp, entropy = response_logprobs(policy, batch, 0.7)
    logp.sum().backward()
    gradient = torch.cat([whole_tensor(one.grad).flatten() for one in policy.parameters()])
    policy.zero_grad()
    return logp.detach(), entropy, gradient


def test_the_lengths_of_a_run_need_few_graphs(compile_with, world):
    """30 shapes: none after the tenth needs another graph. Layers and head have their own graphs
    for one row, without gradient, and in the frozen reference."""
    compile_with("aot_eager")
    _, policy = policies(world)
    _, reference = policies(world)
    reference.requires_grad_(False)
    seen = []
    for batch in batches(30):
        step(policy, batch)
        with torch.no_grad():
            response_logprobs(policy, batch, 0.7, None)
            response_logprobs(reference, batch, 0.7, None)
        seen.append(counters["stats"]["unique_graphs"])
    assert 4 < seen[9] == seen[-1] <= 12


def test_compiled_log_probs_and_gradients_are_the_plain_ones(compile_with, world):
    """By the compiler itself: another order of float32 sums."""
    compile_with("inductor")
    plain, compiled = policies(world)
    for batch in batches(7):
        logp, entropy, gradient = step(plain, batch)
        other_logp, other_entropy, other_gradient = step(compiled, batch)
        assert torch.allclose(other_logp, logp, atol=1e-5)
        assert torch.allclose(other_entropy, entropy, atol=1e-5)
        assert (other_gradient - gradient).norm() < 1e-5 * gradient.norm()
    assert not Compiled.failed


CASES = {
    "recomputed": {"gradient_checkpointing": True},
    "sharded, recomputed": {"dtype": "bfloat16", "gradient_checkpointing": True, "offload": True},
    "experts": {"model": "tiny-moe"},
    "experts, recomputed": {"model": "tiny-moe", "gradient_checkpointing": True},
}


@pytest.mark.parametrize("case", CASES)
def test_other_layers(case, compile_with, world):
    """Also with the experts of another policy replayed."""
    compile_with("aot_eager")
    plain, compiled = policies(world, **CASES[case])
    for batch in batches(3):
        found = [step(policy, batch) for policy in (plain, compiled)]
        assert all(map(torch.equal, *found))
        if plain.routing.active:
            S = int(batch.ends.max())
            experts = plain.routing.recorded().unflatten(0, (len(batch), S))  # [n, S, layers, k]
            batch.replayed_experts = experts.roll(1, dims=1)
            replayed = [step(policy, batch) for policy in (plain, compiled)]
            assert all(map(torch.equal, *replayed))
            assert not torch.equal(replayed[0][0], found[0][0])


def test_norms_of_a_policy_that_was_compiled_before(compile_with, world):
    """They hang hooks into layers, which compiled code would leave out."""
    compile_with("aot_eager")
    args = grpo.Args(temperature=0.7, micro_tokens=200)
    batch = batches(2)[1]
    found = []
    for policy in policies(world):
        step(policy, batch)
        found.append(gradient_norms(policy, batch, args, world))
    assert all(map(torch.equal, *found))


def test_where_it_fails_one_line_and_on_without(compile_with, world, capsys):
    def fails(*arguments: object) -> None:
        raise OSError("no C compiler")

    compile_with(fails)
    plain, compiled = policies(world, gradient_checkpointing=True, offload=True)
    for batch in batches(2):
        assert all(map(torch.equal, step(plain, batch), step(compiled, batch)))
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert "no C compiler" in said


def test_a_run_may_go_on_uncompiled(compile_with, tmp_path, finished):
    """Two steps compiled and two without: the run without."""
    compile_with("aot_eager")
    flags = [*SMALL, "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags, "--steps", 2, "--compile", "on") == 0
    assert counters["stats"]["unique_graphs"] > 4
    assert run_here(grpo.main, *flags, "--steps", 4, "--resume") == 0
    assert_same_run(finished, tmp_path / "run", 4, tmp_path)


def drive_compiled(*flags: object) -> None:
    torch.compile = partial(torch.compile, backend="aot_eager")
    drive("grpo", [*flags, "--compile", "on"])


def test_two_ranks(tmp_path):
    """That share a model in bfloat16, where rows are exchanged."""
    flags = [*SMALL, "--steps", 4, "--shard_ranks", 2, "--dtype", "bfloat16", "--run_dir"]
    assert command("grpo", *flags, tmp_path / "plain", ranks=2).returncode == 0
    ended = forked(drive_compiled, *flags, tmp_path / "compiled", ranks=2)
    assert ended.returncode == 0, ended.stderr
    assert_same_run(tmp_path / "plain", tmp_path / "compiled", 4, tmp_path)

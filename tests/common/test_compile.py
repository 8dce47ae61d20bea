"""--compile: few graphs, the numbers of uncompiled layers, and one line where it fails.

But for one test they compile with "aot_eager": it traces and differentiates as for a compiler, and
computes with the usual kernels. So results are equal to the bit.
"""

import copy
import random
from collections.abc import Callable
from functools import partial

import grpo
import pytest
import torch
from common.batch import Rollout
from common.distributed import World, compiled, shard
from common.logprobs import Policy, response_logprobs
from torch import Tensor
from torch._dynamo.utils import counters

from tests.helpers import SMALL, assert_same_run, command, drive, forked, packed, run_here

pytestmark = pytest.mark.slow


@pytest.fixture
def compile_with(monkeypatch) -> Callable:
    """Set the backend of torch.compile, and forget what was compiled before."""

    def set_backend(backend: str | Callable) -> None:
        torch._dynamo.reset()
        counters.clear()
        compiled.cache_clear()
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))

    return set_backend


def batches(count: int) -> list[Rollout]:
    """Return random tokens in the shapes of micro-batches. Every seventh batch has one row."""
    numbers, made = random.Random(0), []
    for i in range(count):
        rows = 1 if i % 7 == 6 else numbers.randint(2, 19)
        tokens = [numbers.choices(range(2, 18), k=numbers.randint(5, 90)) for _ in range(rows)]
        made.append(packed([tokens[0][:5]] * rows, tokens))
    return made


def sharded(lm: torch.nn.Module, how: bool, world: World, dtype: str = "float32") -> Policy:
    return shard(Policy(copy.deepcopy(lm)), grpo.Args(compile=how, dtype=dtype), world)


def step(policy: Policy, batch: Rollout) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropies, and the gradient of the log-probs' sum."""
    logp, entropy = response_logprobs(policy, batch, 0.7)
    logp.sum().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    policy.zero_grad()
    return logp.detach(), entropy, gradient


def test_the_lengths_of_a_run_need_few_graphs(compile_with, tiny, world):
    """After ten of 30 shapes, no further shape needs another graph. Layers and head have separate
    graphs without gradient, for one row, and in the frozen reference."""
    compile_with("aot_eager")
    trained = sharded(tiny[0], True, world)
    reference = sharded(tiny[0], True, world).requires_grad_(False)
    graphs = []
    for batch in batches(30):
        step(trained, batch)
        with torch.no_grad():
            response_logprobs(trained, batch, 0.7, None)
            response_logprobs(reference, batch, 0.7, None)
        graphs.append(counters["stats"]["unique_graphs"])
    assert 4 < graphs[9] == graphs[-1] <= 12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_compilers_numbers_are_the_plain_ones(compile_with, tiny, world, dtype):
    """They differ by the order of float32 sums. In bfloat16, layers are rounded at the same places,
    because the hf sampler, which is not compiled, must agree."""
    compile_with("inductor")
    plain, fused = (sharded(tiny[0], how, world, dtype) for how in (False, True))
    limit = 1e-5 if dtype == "float32" else 2e-3
    for batch in batches(7):
        for ours, theirs in zip(step(fused, batch), step(plain, batch)):
            assert (ours - theirs).norm() < limit * theirs.norm()


def fails(*arguments: object, **options: object) -> None:
    raise OSError("no C compiler")


def test_where_it_fails_one_line_says_so(compile_with, tmp_path, capsys):
    compile_with(fails)
    assert run_here(grpo.main, *SMALL, "--compile", "--run_dir", tmp_path / "run") == 1
    error = capsys.readouterr().err
    assert "--compile fails" in error and "no C compiler" in error and "Traceback" not in error


def drive_compiled(algorithm: str, flags: list) -> None:
    torch.compile = partial(torch.compile, backend="aot_eager")
    drive(algorithm, [*flags, "--compile"])
    assert counters["stats"]["unique_graphs"] > 4


RUNS = {
    "grpo": "--shard_ranks 2 --dtype bfloat16 --gradient_checkpointing --offload",  # with π_ref
    "minirl": "--model tiny-moe --routing_replay r3",
    "vcpo": "--lag 1",  # hangs hooks into layers, which compiled code would leave out
}


@pytest.mark.parametrize("algorithm", RUNS)
def test_two_ranks_compiled_and_resumed_without(algorithm, tmp_path):
    """Two compiled steps and two more without equal four uncompiled steps, to the bit."""
    flags = [*SMALL, *RUNS[algorithm].split(), "--run_dir"]
    ended = command(algorithm, *flags, tmp_path / "plain", "--steps", 4, ranks=2)
    assert ended.returncode == 0, ended.stderr
    parts = [*flags, tmp_path / "parts"]
    ended = forked(drive_compiled, algorithm, [*parts, "--steps", 2], ranks=2)
    assert ended.returncode == 0, ended.stderr
    ended = command(algorithm, *parts, "--steps", 4, "--resume", ranks=2)
    assert ended.returncode == 0, ended.stderr
    assert_same_run(tmp_path / "plain", tmp_path / "parts", 4, tmp_path)

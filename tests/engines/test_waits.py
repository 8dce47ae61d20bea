"""How often a step makes the host wait for the GPU, and how often the ranks talk to each other.

Each is cheap alone; in a micro-batch of every layer it would be hundreds. Counted in grpo.py's own
`main` on a stored rollout, and held: a line that adds one shows here.
"""

import json
from collections import Counter
from pathlib import Path

import grpo
import pytest
import torch
import torch.distributed as dist
from common import logprobs
from common.batch import Rollout
from common.data import Problem, Task
from common.distributed import World, setup
from common.plumbing.model import load_model
from common.plumbing.tracking import Run
from common.reward import arithmetic_reward
from common.tiny import arithmetic
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import forked, metrics
from tests.engines.pretended import CUDA, Card
from tests.algorithms.stored import PROMPTS, Fixed, G, stored_rollout


def step(patch: pytest.MonkeyPatch, folder: Path, rollout: Rollout, world: World, **flags) -> int:
    """One step of grpo.py on a stored rollout; returns the micro-batches of the update."""
    encode, micros, cut = load_model("tiny")[1], [], logprobs.micro_batches
    problems = [
        Problem(prompt, arithmetic.work(prompt)[1], encode(prompt)["input_ids"], i)
        for i, prompt in enumerate(PROMPTS)
    ]
    judge = lambda texts, answers: list(map(arithmetic_reward, texts, answers))  # noqa: E731
    task = Task("stored", lambda i: problems[i % len(problems)], problems, judge)

    def counted(*given: object) -> list[torch.Tensor]:
        micros.append(cut(*given))
        return micros[-1]

    patch.setattr(grpo, "micro_batches", counted)
    patch.setattr(grpo, "load_task", lambda *given: task)
    patch.setattr(grpo, "make_engine", lambda *given: Fixed(rollout, world))
    patch.setattr(grpo, "evaluate", lambda *given: {"greedy": 0.0, "sampled": 0.0})
    patch.setattr(grpo, "save_checkpoint", lambda *given: None)
    patch.setattr("common.plumbing.tracking.draw_curves", lambda *given: "")
    flags |= {"prompts_per_step": len(PROMPTS), "group_size": G, "minibatches": 1}
    # A step like most: none of its tokens go to samples.jsonl
    args = grpo.Args(run_dir=str(folder / "run"), steps=1, rollout="hf", sample_every=0, **flags)
    args.sampler_tolerance = 1e9
    grpo.main(args, world)
    return len(micros[-1])


# The host and its GPU


def test_what_the_pretended_gpu_notices():
    """Each cause by name; the values are the CPU's, forward and backward; mixing is an error."""
    with Card() as card:
        x = torch.arange(6.0).to(CUDA).requires_grad_()
        y = (x * x)[x > 2].sum()
        y.backward()
        assert y.item() == 9 + 16 + 25 and x.grad.tolist() == [0, 0, 0, 6, 8, 10]
        assert torch.zeros(2, device="cuda").is_cuda and not torch.zeros(2).is_cuda
        with pytest.raises(AssertionError, match="meet the GPU's"):
            x + torch.ones(6)
    causes = {cause for _, cause in card.waits}
    assert causes >= {"copy to the GPU", "index by a mask", "_local_scalar_dense", "tolist"}
    assert card.waits["", "tolist"] == 1


# Of a forward pass: the rows of the micro-batch, the longest of them, transformers' look for packed
# sequences, how many tokens are predicted. Of an update's also: the loss's count, and the place of
# each log-prob in its row, backward. (By boolean indices they were 5 and 12.)
PASS = Counter({"tensor of a list": 1, "_local_scalar_dense": 2, "nonzero": 1})
MICRO = PASS + Counter({"new_tensor": 1, "masked_scatter_backward": 1})


def test_how_often_the_host_waits(world, tmp_path, monkeypatch):
    """4 times in a forward pass, 6 in an update's micro-batch, and else as often whatever there
    is to compute."""
    rollout, found = stored_rollout(world), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for tokens in (16384, 200):
        folder, lm = tmp_path / str(tokens), load_model("tiny")
        with monkeypatch.context() as patch, Card(lambda: Run.phase) as card:
            patch.setattr(grpo, "load_model", lambda *given, lm=lm: lm)  # made without the GPU
            on, how = rollout.to(CUDA), {"micro_tokens": tokens, "dtype": "float32"}
            micros = step(patch, folder, on, World(0, 1, CUDA), **how)
        (line,) = [line for line in metrics(folder / "run") if "sampler_gap_max" in line]
        assert line["sampler_gap_max"] < 1e-4  # the values are right
        by_phase = {"old_logp": Counter(), "update": Counter()}
        for (stage, cause), times in card.waits.items():
            by_phase.get(stage, Counter())[cause] += times
        found.append((micros, by_phase))
    (few, before), (many, after) = found
    assert few == 1 < many
    for name, passes, each in (("old_logp", 2, PASS), ("update", 1, MICRO)):
        more = after[name] - before[name]
        assert more == Counter({cause: passes * n * (many - few) for cause, n in each.items()})
        rest = before[name].total() - passes * each.total()
        assert rest == {"old_logp": 7, "update": 5}[name], before[name]


# The ranks


class Messages(TorchDispatchMode):
    """Counts by phase the collectives that begin, FSDP's and those of the backward pass too."""

    def __init__(self):
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operator: object, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if operator.namespace in ("c10d", "_c10d_functional") and "wait" not in operator.__name__:
            self.sent[Run.phase] += 1
        return operator(*args, **(kwargs or {}))


def count_messages(folder: Path) -> None:
    """On each of two ranks: what is sent in a step, by phase, for small and large micro-batches,
    where each has a model of its own and where they share one."""
    world, found = setup(), []
    rollout = Rollout(**torch.load(folder / "rollout.pt"))
    for shared, tokens in ((1, 16384), (1, 100), (2, 16384), (2, 100)):
        how = {"shard_ranks": shared, "micro_tokens": tokens, "dtype": "float32"}
        with pytest.MonkeyPatch.context() as patch, Messages() as messages:
            micros = step(patch, folder / f"{shared} {tokens}", rollout, world, **how)
        found.append((shared, micros, messages.sent))
    (folder / f"{world.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def test_how_often_the_ranks_talk(world, tmp_path):
    """A plain model's gradient is one message for all micro-batches. FSDP gathers each of its units
    (here two layers and the root) in each pass, again in a backward pass, and adds their gradients
    up. The rest does not depend on the micro-batches. (The norm's sum is not seen here.)"""
    torch.save(vars(stored_rollout(world)), tmp_path / "rollout.pt")
    ended = forked(count_messages, tmp_path, ranks=2)
    assert ended.returncode == 0, ended.stderr
    rows, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert rows == other and rows[0][1] < rows[1][1]
    for shared, micros, sent in rows:
        units = 3 * (shared == 2)
        # Rows that change ranks are 13 of the 17.
        expected = {"old_logp": 17 + 2 * micros * units}
        expected["update"] = 2 + (shared == 1) + 3 * micros * units
        expected |= {"sync": 2, "log": 2}  # means; whether to stop
        assert {name: sent.get(name, 0) for name in expected} == expected, (shared, micros, sent)

"""The gradient applied is that of the written objective, whatever the micro-batches, ranks, padding
and row order.

`python tests/test_exactness.py FOLDER` is the rank that the two-rank test starts with torchrun.
"""

import importlib
import sys
import zlib
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import common  # noqa: F401  (before torch)
import pytest
import torch
from adapters import ALGORITHMS
from common.batch import Rollout
from common.data import Problem, Task
from common.distributed import World, setup
from common.model import load_model
from common.reward import arithmetic_reward
from common.rollout import HFEngine
from common.tiny import arithmetic

PROMPTS = ["7*8-9+6=", "1+2=", "3*3*3*3*3*3*3=", "9-9=", "4+5*6=", "0*1+2-3=", "8*8=", "5-6+7*8-9="]
G = 4


class Fixed:
    """An engine that returns a stored rollout: this rank's share of it. Branches depend on their
    prefix alone."""

    reports_experts = False

    def __init__(self, rollout: Rollout, world: World):
        share = len(rollout) // world.size
        self.rollout = rollout.rows(slice(world.rank * share, (world.rank + 1) * share))
        self.world = world

    def generate(
        self, prompts: list, n: int, limit: int, temperature: float, prefixes: list | None = None
    ) -> Rollout:
        if prefixes is None:
            return Rollout(**vars(self.rollout))
        groups = []
        for prompt, prefix in zip(prompts, prefixes):
            engine = HFEngine(
                load_model("tiny")[0], self.world, seed=0, dtype="float32", max_rows=1024
            )
            engine.generator.manual_seed(zlib.crc32(bytes(prompt + prefix)))
            groups.append(engine.generate([prompt], n, limit, temperature, [prefix]))
            noise = torch.randn(groups[-1].mask.shape, generator=engine.generator)
            groups[-1].stored_logp = groups[-1].rollout_logp + 0.3 * noise * groups[-1].mask
        return Rollout.join(*groups)

    def sync(self, policy: torch.nn.Module) -> None:
        pass

    def state_dict(self) -> dict:
        return {}


FLAGS = {
    "stapo": {"tau_p": 0.9, "entropy_quantile": 0.95},
    "vcpo": {"lag": 0},
    "goldilocks": {"candidates": 1},
}


def gradients(
    rollout: Rollout,
    prompts: list[str],
    world: World,
    folder: Path,
    monkeypatch,
    name: str = "grpo",
    **flags,
) -> torch.Tensor:
    """Each mini-batch's gradient, before clipping, of the file's own `main` on a stored rollout; lr
    is next to 0."""
    module = importlib.import_module(name)
    recompute, norm = module.all_logprobs, module.clip_gradients
    encode = load_model("tiny")[1]
    problems = [
        Problem(prompt, arithmetic.work(prompt)[1], encode(prompt)["input_ids"])
        for prompt in prompts
    ]
    task = Task(
        "stored", lambda i: problems[i], problems, lambda c, a: list(map(arithmetic_reward, c, a))
    )
    seen = []

    def spy(policy: torch.nn.Module, max_norm: float) -> float:
        if max_norm == float("inf"):
            return norm(policy, max_norm)  # vcpo asks for the norm of each response's gradient
        full = [
            p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            for p in policy.parameters()
        ]
        seen.append(torch.cat([gradient.flatten() for gradient in full]).clone())
        return 0.0

    def old_logprobs(policy: torch.nn.Module, batch: Rollout, args: object, world: World) -> tuple:
        """Log-probs of "π_old" moved at random, so that ratios leave 1 and some tokens are
        clipped."""
        return (
            recompute(policy, batch, args, world)
            if hasattr(batch, "old_logp")
            else (batch.stored_logp, None)
        )

    flags = {"minibatches": 2} | FLAGS.get(name, {}) | flags
    args = module.Args(
        steps=1, prompts_per_step=len(prompts), group_size=G, lr=1e-12, dtype="float32", **flags
    )
    args.run_dir = str(folder / "run")
    with monkeypatch.context() as patch:
        patch.setattr(module, "all_logprobs", old_logprobs)
        patch.setattr(module, "check_sampler", lambda *arguments: {})
        patch.setattr(module, "load_task", lambda *arguments: task)
        patch.setattr(module, "make_engine", lambda *arguments: Fixed(rollout, world))
        patch.setattr(module, "evaluate", lambda *arguments: {"greedy": 0.0, "sampled": 0.0})
        patch.setattr(module, "clip_gradients", spy)
        patch.setattr("common.tracking.draw_curves", lambda *arguments: "")
        patch.setattr(module, "save_checkpoint", lambda *arguments: None)
        module.main(args, world)
    return torch.stack(seen)


def stored_rollout(world: World) -> Rollout:
    lm, tokenizer = load_model("tiny")
    engine = HFEngine(lm, world, seed=0, dtype="float32", max_rows=1024)
    rollout = engine.generate([tokenizer(prompt)["input_ids"] for prompt in PROMPTS], G, 64, 1.0)
    noise = torch.randn(rollout.mask.shape, generator=torch.Generator().manual_seed(0))
    rollout.stored_logp = rollout.rollout_logp + 0.3 * noise * rollout.mask
    return rollout


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    """Equal but for float32 rounding, of which 1.05e-6 was seen where 32 single rows are added
    up."""
    assert one.shape == other.shape and (one.norm(dim=1) > 1e-3).all()
    assert ((one - other).norm(dim=1) / one.norm(dim=1)).max() < 2e-6


@pytest.fixture
def reference(world, tmp_path, monkeypatch):
    rollout = stored_rollout(world)
    return rollout, gradients(rollout, PROMPTS, world, tmp_path, monkeypatch)


@pytest.mark.parametrize("micro_tokens", [1, 80, 400])
def test_micro_batch_size_changes_nothing(reference, world, tmp_path, monkeypatch, micro_tokens):
    rollout, whole = reference
    assert_same(
        gradients(rollout, PROMPTS, world, tmp_path, monkeypatch, micro_tokens=micro_tokens), whole
    )


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "grpo"])
def test_micro_batch_size_changes_nothing_elsewhere(world, tmp_path, monkeypatch, name):
    rollout = stored_rollout(world)
    whole = gradients(rollout, PROMPTS, world, tmp_path, monkeypatch, name)
    assert_same(
        gradients(rollout, PROMPTS, world, tmp_path, monkeypatch, name, micro_tokens=150), whole
    )
    if name == "stapo":  # with these flags enough is silenced to see it
        silent = gradients(rollout, PROMPTS, world, tmp_path, monkeypatch, name, tau_p=0.0)
        assert (whole - silent).norm() > 1e-3 * whole.norm()


def test_padding_changes_nothing(reference, world, tmp_path, monkeypatch):
    """20 more columns of padding, filled with a real token id."""
    rollout, whole = reference
    wide = {name: column for name, column in vars(rollout).items() if column.dim() == 1}
    for name, column in vars(rollout).items():
        if column.dim() == 2:
            filler = 5 if name in ("sequences", "tokens") else 0
            wide[name] = torch.nn.functional.pad(column, (0, 20), value=filler)
    assert_same(gradients(Rollout(**wide), PROMPTS, world, tmp_path, monkeypatch), whole)


def test_row_order_changes_nothing(reference, world, tmp_path, monkeypatch):
    """Responses shuffled inside their groups, and groups inside their mini-batch."""
    rollout, whole = reference
    generator = torch.Generator().manual_seed(1)
    half = len(PROMPTS) // 2
    groups = [
        *torch.randperm(half, generator=generator),
        *(half + torch.randperm(half, generator=generator)),
    ]
    order = torch.cat([group * G + torch.randperm(G, generator=generator) for group in groups])
    prompts = [PROMPTS[group] for group in groups]
    assert_same(gradients(rollout.rows(order), prompts, world, tmp_path, monkeypatch), whole)


def test_dropping_the_last_token_would_show(reference, world, tmp_path, monkeypatch):
    """The comparison can fail: without the EOS tokens the gradient is another."""
    rollout, whole = reference
    cut = Rollout(**vars(rollout))
    cut.mask = rollout.mask * (rollout.mask.cumsum(1) < rollout.mask.sum(1, keepdim=True))
    with pytest.raises(AssertionError):
        assert_same(gradients(cut, PROMPTS, world, tmp_path, monkeypatch), whole)


def test_two_ranks_change_nothing(world, tmp_path, monkeypatch, command):
    """Two gloo ranks, each with half of the groups and its own micro-batches, against one, for
    every file.

    A rank's share is cut into mini-batches on its own, so one mini-batch is compared: all groups of
    both ranks.
    """
    rollout = stored_rollout(world)
    torch.save(vars(rollout), tmp_path / "rollout.pt")
    done = command(
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__, tmp_path
    )
    assert done.returncode == 0, done.stderr
    for name, found in torch.load(tmp_path / "gradients.pt").items():
        assert_same(
            found, gradients(rollout, PROMPTS, world, tmp_path, monkeypatch, name, minibatches=1)
        )


if __name__ == "__main__":
    folder, world = Path(sys.argv[1]), setup()
    stored = Rollout(**torch.load(folder / "rollout.pt"))
    flags = {"minibatches": 1, "micro_tokens": 300 + 200 * world.rank}
    found = {
        n: gradients(stored, PROMPTS, world, folder, pytest.MonkeyPatch(), n, **flags)
        for n in ALGORITHMS
    }
    if world.rank == 0:
        torch.save(found, folder / "gradients.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

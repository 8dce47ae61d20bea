"""A stored rollout, and the gradients that a file's own `main` makes of it."""

import zlib
from pathlib import Path

import common  # noqa: F401  (before torch)
import torch
from common.batch import Rollout
from common.data import Problem, Task
from common.distributed import World
from common.model import load_model
from common.rollout import HFEngine
from common.tiny import arithmetic
from common.tiny.arithmetic import arithmetic_reward
from variants import steps

from tests.loop import formulas
from tests.helpers import module_of

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
    "paced": {"candidates": 1},
    "signs": {"outliers": 1.5},
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
    module = module_of(name)
    recompute, encode, seen = module.all_logprobs, load_model("tiny")[1], []
    part_marks = name == "blockwise"

    def train(i: int) -> Problem:
        prompt = prompts[i % len(prompts)]
        worked, answer = arithmetic.work(prompt)
        solution = ";".join(worked) + "#" + answer
        own = solution if part_marks else answer
        return Problem(prompt, own, encode(prompt)["input_ids"], i)

    def verifier(completions: list[str], answers: list[str]) -> list[float]:
        marks = steps.reward if part_marks else arithmetic_reward
        return list(map(marks, completions, answers))

    task = Task("stored", train, [train(0)], verifier, tokenizer=encode)

    def spy(policy: torch.nn.Module, max_norm: float) -> float:
        parts = [getattr(p.grad, "full_tensor", p.grad.clone)() for p in policy.parameters()]
        seen.append(torch.cat([part.flatten() for part in parts]))
        return 0.0

    def old_logprobs(
        policy: torch.nn.Module, batch: Rollout, args: object, world: World, *readout: object
    ) -> tuple:
        """Of "π_old", moved at random: ratios leave 1 and some tokens are clipped."""
        if hasattr(batch, "old_logp"):
            return recompute(policy, batch, args, world, *readout)
        found = recompute(policy, batch, args, world, *readout)[1] if readout else None
        return batch.stored_logp, found

    flags = {"minibatches": 2} | FLAGS.get(name, formulas.of(name, "STORED", {})) | flags
    flags |= {"steps": 1, "prompts_per_step": len(prompts), "group_size": G, "lr": 1e-12}
    args = module.Args(dtype="float32", run_dir=str(folder / "run"), **flags)
    args.sampler_tolerance = 1e9
    with monkeypatch.context() as patch:
        patch.setattr(module, "all_logprobs", old_logprobs)
        patch.setattr(module, "load_task", lambda *arguments: task)
        patch.setattr(module, "make_engine", lambda *arguments, **named: Fixed(rollout, world))
        patch.setattr(module, "evaluate", lambda *arguments: {"greedy": 0.0, "sampled": 0.0})
        patch.setattr(module, "clip_gradients", spy)
        patch.setattr("common.run.draw_run", lambda *arguments: "")
        patch.setattr(module, "save_checkpoint", lambda *arguments: None)
        module.main(args, world)
    return torch.nn.utils.rnn.pad_sequence(seen, batch_first=True)  # a critic has its own length


def stored_rollout(world: World) -> Rollout:
    lm, tokenizer = load_model("tiny")
    engine = HFEngine(lm, world, seed=0, dtype="float32", max_rows=1024)
    rollout = engine.generate([tokenizer(prompt)["input_ids"] for prompt in PROMPTS], G, 64, 1.0)
    noise = torch.randn(rollout.mask.shape, generator=torch.Generator().manual_seed(0))
    rollout.stored_logp = rollout.rollout_logp + 0.3 * noise * rollout.mask
    return rollout

"""A file's own `main` on the stored answers: what reaches its optimiser, its engine and its log.

The learning rate is one at which π_θ leaves π_old within one step, and (in the second step) both
have left the reference.
"""

import copy
import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest
from common.batch import Rollout
from common.data import Problem, Task
from common.distributed import World
from common.model import load_model
from common.tasks.sources import arithmetic_verdicts
from common.tiny.arithmetic import work
import torch
from torch import Tensor

from checks import run_of
from tests.loop.answers import EOS, HELD_OUT, LIMIT, SAMPLES, TEMPERATURE, TRAIN, VOCABULARY
from tests.loop.answers import G, M, P, expert_choice, respond, sampler_logp, untrained


class Stored:
    """An engine that returns the stored answers and writes down what it was asked."""

    def __init__(self, world: World, model: str):
        self.world, self.model, self.reports_experts = world, model, model == "model-moe"
        self.calls, self.synced = [], []

    def generate(
        self, prompts: list, n: int, limit: int, temperature: float, prefixes=None, top_p=1.0
    ) -> Rollout:
        texts = ["".join(VOCABULARY[t] for t in prompt) for prompt in prompts]
        starts = ["".join(VOCABULARY[t] for t in prefix) for prefix in prefixes or []]
        rows = []
        for i, text in enumerate(texts):
            rows += respond(text, n, starts[i] if prefixes else "")
        call = {"prompts": texts, "n": n, "limit": limit, "temperature": temperature}
        self.calls.append(call | {"top_p": top_p, "prefixes": starts if prefixes else None})
        return Rollout.pack(
            prompts=prompts,
            prefixes=prefixes,
            tokens=[list(row.tokens) for row in rows],
            logps=[list(sampler_logp(row, self.model)) for row in rows],
            eos=[EOS],
            device=self.world.device,
            experts=[expert_choice(row) for row in rows] if self.reports_experts else None,
        )

    def sync(self, policy: torch.nn.Module) -> None:
        self.synced.append(whole(policy.parameters()))

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


def whole(tensors: object) -> list[Tensor]:
    """Return copies of whole tensors, also if ranks hold only rows of them."""
    every = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in tensors]
    return [x.detach().clone() for x in every]


def flat(tensors: object) -> Tensor:
    return torch.cat([x.flatten() for x in tensors]).double()


@dataclass
class Record:
    """What one rank's `main` did."""

    rank: int
    flags: dict
    updates: list[dict] = field(default_factory=list)  # what the policy's optimiser was given
    lessons: list[dict] = field(default_factory=list)  # of a teacher or critic, likewise
    calls: list[dict] = field(default_factory=list)
    synced: list[list[Tensor]] = field(default_factory=list)
    metrics: list[dict] = field(default_factory=list)  # rank 0's log

    @property
    def training(self) -> list[dict]:
        """Return the calls that sampled for training (evaluations ask for 1 or SAMPLES
        responses)."""
        return [call for call in self.calls if call["n"] == G and call["prefixes"] is None]


DEFAULTS = {
    "lr": 1e-3,
    "warmup": 3,
    "micro_tokens": 220,
    "temperature": TEMPERATURE,
    "minibatches": M,
}
DEFAULTS |= {"betas": (0.8, 0.9), "weight_decay": 0.01, "steps": 2}


@lru_cache(2)
def loaded(name: str) -> tuple:
    """Return the embedded model and its tokenizer as the files load them, from the disk only
    once."""
    return load_model(name)


def task() -> Task:
    """Return problems by number."""

    def problem(prompt: str, index: int = -1) -> Problem:
        ids = [VOCABULARY.index(c) for c in prompt]
        return Problem(prompt, work(prompt)[1], ids, index)

    return Task(
        "arithmetic",
        lambda index: problem(TRAIN[index % len(TRAIN)], index),
        [problem(prompt) for prompt in HELD_OUT],
        arithmetic_verdicts,
        tokenizer=loaded("tiny")[1],
    )


def record(module: ModuleType, world: World, folder: Path, model: str = "model", **flags) -> Record:
    """Run the module's `main` for some steps on the stored answers."""
    name = module.__name__.removesuffix("_mutant").rpartition(".")[2]
    flags = DEFAULTS | run_of(name).stored | flags
    shape = {"prompts_per_step": P, "group_size": G, "max_new_tokens": LIMIT, "dtype": "float32"}
    args = module.Args(**shape | {"shard_ranks": world.size} | flags)
    args.run_dir, args.eval_every, args.eval_samples = str(folder), 100, SAMPLES
    args.model, args.sampler_tolerance = model.replace("model", "tiny"), 1e9
    engine, result = Stored(world, model), Record(world.rank, vars(args))

    class Watched(torch.optim.AdamW):
        """AdamW that writes down what it is given."""

        def step(self, closure: object = None) -> None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            seen = {"parameters": whole(parameters), "gradients": whole(p.grad for p in parameters)}
            for name in ("lr", "betas", "weight_decay"):
                seen[name] = [group[name] for group in self.param_groups]
            policy = len(parameters) == len(list(untrained(model).parameters()))
            (result.updates if policy else result.lessons).append(seen)
            super().step(closure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_model", lambda name, *flag: copy.deepcopy(loaded(name)))
        patch.setattr(module, "load_task", lambda *arguments: task())
        patch.setattr(module, "make_engine", lambda *arguments, **named: engine)
        patch.setattr(module, "save_checkpoint", lambda *arguments: None)
        patch.setattr("common.run.draw_run", lambda *arguments: "")
        patch.setattr(torch.optim, "AdamW", Watched)
        patch.setattr("common.distributed.StopFlag.listen", lambda flag: None)
        module.main(args, world)
    world.closing.close()
    result.calls, result.synced = engine.calls, engine.synced
    if world.rank == 0:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        result.metrics = list(map(json.loads, lines))
    return result

"""Stage one of the panels: a policy's responses, sampled once and stored.

`measure` are P groups that no update sees, `train` the mini-batches of the updates, `bfloat16` and
`float8` responses of samplers of that precision, `cuts` new endings of the failed responses of
`measure`, and `roots` as many new responses to the same prompts.
"""

import random
from dataclasses import dataclass, replace
from pathlib import Path

from common.batch import Rollout
from common.data import load_task
from common.distributed import ALONE
from common.logprobs import Policy
from common.model import load_model
from common.rollout import HFEngine
from common.run import atomic_write
import torch
from torch import Tensor

import deep_grpo
import grpo

G = 8  # responses to a prompt
CUT, K = 4, 4  # failed responses to a prompt that are cut, at most; new endings of each
UPDATES = (0, 1, 2, 4, 8, 16)  # optimiser steps after which the policy is looked at
PRECISIONS = ("bfloat16", "float8")


@dataclass(frozen=True)
class Subject:
    """A model, what it is asked, and how large one of its updates is."""

    model: str
    task: str
    lr: float
    limit: int  # new tokens
    prompts: int  # P
    batch: int = 4  # prompts in a mini-batch
    only_stapo: bool = False  # no other panel

    def args(self, seed: int) -> grpo.Args:
        """Flags of grpo.py, without its KL term: the other objectives have none."""
        how = {"model": self.model, "task": self.task, "seed": seed, "lr": self.lr, "beta": 0.0}
        return grpo.Args(**how, max_new_tokens=self.limit, group_size=G, eval_problems=1)


class Sampler:
    """Draws problems of a task in order, and samples responses with one engine per precision."""

    def __init__(self, subject: Subject, seed: int):
        self.subject, self.seed, self.next = subject, seed, 100_000 * seed
        self.lm, self.tokenizer = load_model(subject.model, ALONE)
        self.task = load_task(subject.args(seed), self.tokenizer)
        self.policy = Policy(self.lm)

    def engine(self, precision: str) -> HFEngine:
        engine = HFEngine(self.lm, ALONE, self.seed, precision, max_rows=256)
        engine.sync(self.policy)
        return engine

    def problems(self, count: int) -> list:
        start, self.next = self.next, self.next + count
        return [self.task.train(i) for i in range(start, self.next)]

    def groups(self, engine: HFEngine, problems: list, n: int, prefixes: list | None = None):
        """`n` scored responses to each problem: a Rollout with rewards."""
        prompts = [problem.prompt_ids for problem in problems]
        rollout = engine.generate(prompts, n, self.subject.limit, 1.0, prefixes)
        self.task.score(rollout, problems, n)
        return rollout


def sample(subject: Subject, seed: int) -> dict[str, Rollout]:
    """All responses of one subject. The columns `origin` and `depth` of `cuts` and `roots` are the
    failed response's row in `measure` and the share of its tokens that is kept."""
    sampler = Sampler(subject, seed)
    exact = sampler.engine("float32")
    asked = sampler.problems(subject.prompts)
    found = {"measure": sampler.groups(exact, asked, G)}
    found["train"] = sampler.groups(exact, sampler.problems(max(UPDATES) * subject.batch), G)
    for precision in PRECISIONS:
        others = sampler.problems(subject.prompts // 2)
        found[precision] = sampler.groups(sampler.engine(precision), others, G)

    # Each failed response is cut once, anywhere with the same chance: DEEP-GRPO's own Q would
    # leave some depths without a cut
    texts = sampler.tokenizer.batch_decode([[t] for t in range(len(sampler.tokenizer))])
    ends = {i for i, text in enumerate(texts) if text.rstrip(" ").endswith(";")}
    rng, responses = random.Random(seed), found["measure"].response_ids()
    failing = found["measure"].rewards.view(-1, G) == 0  # [P, G]
    failed = (failing & (failing.cumsum(1) <= CUT)).flatten().nonzero()[:, 0]  # [F]
    prefixes = []
    for row in failed.tolist():
        kept = rng.choice(deep_grpo.pivots(responses[row], ends))
        prefixes.append(responses[row][:kept])
    parents = [asked[row // G] for row in failed.tolist()]
    lengths = torch.tensor([len(responses[row]) for row in failed.tolist()])  # [F]
    kept = torch.tensor([len(prefix) for prefix in prefixes])  # [F]
    for name, given in (("cuts", prefixes), ("roots", None)):
        found[name] = sampler.groups(exact, parents, K, given)
        found[name].origin = failed.repeat_interleave(K)  # [F·K]
        depth = kept / lengths if given else torch.zeros(len(failed))  # [F]
        found[name].depth = depth.repeat_interleave(K)  # [F·K]
    return found


def stored(path: Path, subject: Subject, seed: int) -> dict[str, Rollout]:
    """The responses of `path`, sampled and written if there are none of this subject."""
    if not path.exists() or torch.load(path, weights_only=True)["subject"] != vars(subject):
        columns = {name: vars(rollout) for name, rollout in sample(subject, seed).items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            torch.save({"subject": vars(subject), "columns": columns}, partial)
    content = torch.load(path, weights_only=True)
    return {name: Rollout(**columns) for name, columns in content["columns"].items()}


def advantages(rollout: Rollout, n: int = G) -> Tensor:
    """GRPO's, of groups of n: `[N]`."""
    return grpo.advantages(rollout.rewards.view(-1, n)).flatten()


def small(subject: Subject) -> Subject:
    """Of a quick run: fewer prompts and updates' responses, and wide intervals."""
    return replace(subject, prompts=8, batch=1)

"""DAPO: JustRL's loss, the punishment of length, and the rounds of sampling."""

from dataclasses import replace
from types import ModuleType, SimpleNamespace

import torch
from common.batch import Rollout
from common.distributed import ALONE
from torch import Tensor

from . import Batch, cut_shares, justrl, surrogate, token_mean, written_here


def trained(b: Batch) -> Tensor:
    """With `--mask_truncated` a response that was cut off has no token in the loss."""
    return b.mask * (b.finished[:, None] | (not b.args.mask_truncated))


def objective(b: Batch) -> tuple[Tensor, Tensor]:
    """The mean over the tokens of all responses, or of those that were not cut off."""
    return token_mean(surrogate(b), trained(b))


def statistics(b: Batch) -> dict[str, tuple]:
    """clip_share, clip_above and clip_below of the tokens that are trained."""
    return cut_shares(Batch(**vars(b) | {"mask": trained(b)}), b.A[:, None])


CASES = [{}, {"mask_truncated": True, "clip_high": 0.2}]

IDLE, MIXED = [1, 1], [0, 1]


class Known:
    """Sampler and tasks in one: the answers to prompt n get the verdicts `groups[n]`, and response
    j has n + j tokens, which are n."""

    def __init__(self, groups: dict[int, list[int]]):
        self.groups, self.asked = groups, []

    def train(self, n: int) -> SimpleNamespace:
        return SimpleNamespace(prompt_ids=[n], index=n)

    def generate(self, prompts: list, n: int, limit: int, temperature: float) -> Rollout:
        self.asked.append([number for (number,) in prompts])
        rows = [[number] * (number + j) for number in self.asked[-1] for j in range(n)]
        logps = [[0.0] * len(row) for row in rows]
        return Rollout.pack(prompts=prompts, tokens=rows, logps=logps, eos=[9], device="cpu")

    def score(self, rollout: Rollout, problems: list, *_: object) -> Tensor:
        assert rollout.tokens[::2, 0].tolist() == [problem.index for problem in problems]
        return torch.tensor([self.groups[problem.index] for problem in problems]).float()


def check_idle_slots_are_filled(module: ModuleType) -> None:
    """Slots of zero-variance groups get the next prompts, round after round, and no other slots do.
    Every row has its own reward. All draws are counted."""
    known = Known({2: IDLE, 3: IDLE, 4: [0, 0], 5: MIXED, 6: [1, 0]})
    sizes = {"group_size": 2, "max_new_tokens": 9, "overlong_buffer": 9}
    draws = module.Draws(replace(module.Args(), **sizes), known, known, ALONE)
    draws.drawn = 2
    problems = draws.problems(2)
    rollout = known.generate([p.prompt_ids for p in problems], 2, 9, 0.5)
    rollout, rewards = draws.refill(rollout, known.score(rollout, problems))
    assert known.asked == [[2, 3], [4, 5], [6]] and draws.drawn == 7
    assert rollout.tokens[:, 0].tolist() == [6, 6, 5, 5]  # the place of 2 taken by 4, then by 6
    assert rewards.tolist() == [[1, 0], [0, 1]]
    assert rollout.mask.sum(dim=1).tolist() == [6, 7, 5, 6]
    found = {name: (float(a), b) for name, (a, b) in draws.statistics(rollout).items()}
    # Dropped: 2 + 3 tokens of prompt 2, 3 + 4 of prompt 3, 4 + 5 of prompt 4
    assert found["rounds"] == (3, 1) and found["drawn_per_used"] == (10, 4)
    assert found["extra_tokens"] == (21, 24) and found["tokens"] == (21, None)
    assert found["reward_drawn"] == (6, 10)  # 2 + 2 + 0 + 1 + 1


def check_overlong(module: ModuleType) -> None:
    """The paper's: 0 up to 16384 tokens, then linear down to -1 at 20480; here half of it."""
    flags = {"max_new_tokens": 20480, "overlong_buffer": 4096}
    lengths = torch.tensor([0.0, 16384, 16385, 18432, 20480])
    args = replace(module.Args(), overlong_penalty=1.0, **flags)
    expected = torch.tensor([0.0, 0.0, -1 / 4096, -0.5, -1.0])
    assert torch.allclose(module.overlong(lengths, args), expected)
    assert torch.allclose(module.overlong(lengths, replace(module.Args(), **flags)), expected / 2)
    flags["overlong_buffer"] = 0
    assert (module.overlong(lengths, replace(module.Args(), **flags)) == 0).all()


def check_idle_groups_stay_idle(module: ModuleType) -> None:
    """In zero-variance groups lengths alone give no advantage; in other groups they do: verdicts 1,
    1 with 8 and 9 tokens, 1, 0 with 9 and 5."""
    rows, logps = [[3] * n for n in (8, 9, 9, 5)], [[0.0] * n for n in (8, 9, 9, 5)]
    batch = Rollout.pack(prompts=[[1], [1]], tokens=rows, logps=logps, eos=[3], device="cpu")
    args = replace(module.Args(), max_new_tokens=9, overlong_buffer=4)
    made = module.punished(torch.tensor([[1.0, 1], [1, 0]]), batch, args)
    assert torch.equal(made, torch.tensor([[1.0, 1], [0.5, 0]]))
    assert module.advantages(made)[0].tolist() == [0, 0] and module.advantages(made)[1, 0] > 0


CHECKS = [*written_here(globals()), *justrl.CHECKS]

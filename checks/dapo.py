"""DAPO: JustRL's loss, the punishment of length, and the rounds of sampling, with a sampler whose
verdicts are known."""

from dataclasses import replace
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
from common.batch import Rollout
from common.data import Task
from common.distributed import World
from torch import Tensor

from . import Batch, cut_shares, justrl, surrogate, token_mean, written_here


def trained(b: Batch) -> Tensor:
    """With `--mask_truncated` responses that were cut off have no token in the loss."""
    return b.mask * (b.finished[:, None] | (not b.args.mask_truncated))


def objective(b: Batch) -> tuple[Tensor, Tensor]:
    """Equation 8, with the filter of overlong responses of section 3.4."""
    return token_mean(surrogate(b), trained(b))


def statistics(b: Batch) -> dict[str, tuple]:
    """Of the tokens that are trained: clip_share counts those that lose their gradient by the clip,
    clip_above and clip_below its two sides."""
    return cut_shares(Batch(**vars(b) | {"mask": trained(b)}), b.r, b.A[:, None])


CASES = [{}, {"mask_truncated": True, "clip_high": 0.2}]

IDLE, MIXED = [1, 1], [0, 1]


class Known:
    """Sampler, tokenizer and verifier in one. The answers to prompt n get the verdicts `groups[n]`
    (later prompts [1, 1]). Response j has n + j tokens: n, its verdict, and filler."""

    score = Task.score

    def __init__(self, groups: list[list[int]]):
        self.tokenizer = self
        self.groups, self.asked = dict(enumerate(groups)), []

    def train(self, n: int) -> SimpleNamespace:
        return SimpleNamespace(prompt_ids=[n], answer=str(n), index=n)

    def generate(self, prompts: list, n: int, limit: int, temperature: float) -> Rollout:
        assert (n, limit, temperature) == (2, 9, 0.5)
        self.asked.append([number for (number,) in prompts])
        rows = [
            [number, verdict, *[9] * (number + j - 2)]
            for number in self.asked[-1]
            for j, verdict in enumerate(self.groups.get(number, IDLE))
        ]
        logps = [[0.0] * len(row) for row in rows]
        return Rollout.pack(prompts=prompts, tokens=rows, logps=logps, eos=[9], device="cpu")

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [f"{row[0]}:{row[1]}" for row in rows]

    def verifier(self, texts: list[str], answers: list[str]) -> list[float]:
        assert [text.split(":")[0] for text in texts] == answers  # each by its own prompt's answer
        return [float(text.split(":")[1]) for text in texts]


def refilled(module: ModuleType, groups: list[list[int]], **flags: object) -> tuple:
    """A step of two groups of two on prompts 2, 3, ...: the sampler, the draws, and their
    results."""
    known = Known([[], [], *groups])
    sizes = {"group_size": 2, "max_new_tokens": 9, "overlong_buffer": 9, "temperature": 0.5}
    args = replace(module.Args(), **sizes, **flags)
    draws = module.Draws(args, known, known, World(0, 1, torch.device("cpu")))
    draws.drawn = 2
    with patch.object(module, "gather", lambda values, world: values):  # of one rank
        problems = draws.problems(2)
        rollout = known.generate([p.prompt_ids for p in problems], 2, 9, 0.5)
        verdicts = torch.tensor([groups[0], groups[1]]).float()  # [2, 2]
        return known, draws, *draws.refill(rollout, verdicts)


def check_idle_slots_are_filled(module: ModuleType) -> None:
    """Slots of zero-variance groups get the next prompts, round after round, and no other slots do.
    Every row has its own reward."""
    known, draws, rollout, rewards = refilled(module, [IDLE, MIXED, [0, 0], [1, 0], MIXED])
    assert known.asked == [[2, 3], [4], [5]] and draws.drawn == 6
    assert rollout.tokens[:, 0].tolist() == [5, 5, 3, 3]  # the place of 2 taken by 4, then by 5
    assert rollout.tokens[:, 1].tolist() == [1, 0, 0, 1] and rewards.tolist() == [[1, 0], [0, 1]]
    assert rollout.mask.sum(dim=1).tolist() == [5, 6, 3, 4]
    known, *_, rollout, _ = refilled(module, [IDLE, IDLE, MIXED, MIXED])
    assert known.asked == [[2, 3], [4, 5]] and rollout.tokens[::2, 0].tolist() == [4, 5]
    known, *_ = refilled(module, [[0.3, 0.7], [0.5, 0.5], MIXED])  # partial rewards
    assert known.asked == [[2, 3], [4]]


def check_most_rounds(module: ModuleType) -> None:
    """After `max_draws` rounds the zero-variance groups stay; with 1 nothing is drawn again."""
    for rounds in (1, 3):
        known, _, rollout, rewards = refilled(module, [IDLE, MIXED] + [IDLE] * 9, max_draws=rounds)
        assert known.asked == [[2, 3], [4], [5]][:rounds]
        assert rewards.tolist() == [[1, 1], [0, 1]] and len(rollout) == 4


def check_cost(module: ModuleType) -> None:
    """Rounds, groups, tokens that are dropped, and the reward of all samples; by hand."""
    _, draws, rollout, _ = refilled(module, [IDLE, MIXED, [0, 0], [1, 0]])
    found = {name: (float(a), b) for name, (a, b) in draws.statistics(rollout).items()}
    # Dropped: 2 + 3 tokens of prompt 2, 4 + 5 of prompt 4; kept: 3 + 4 and 5 + 6
    assert found["rounds"] == (3, 1) and found["drawn_per_used"] == (8, 4)
    assert found["extra_tokens"] == (14, 18) and found["tokens"] == (14, None)
    assert found["reward_drawn"] == (4, 8)  # 2 + 1 + 0 + 1


def check_one_stream_for_all_ranks(module: ModuleType) -> None:
    """Each rank takes its prompts after those of the ranks before it; all ranks count all
    prompts."""
    known = Known([])
    for rank, mine in ((0, [10, 11]), (1, []), (2, [12, 13, 14])):
        draws = module.Draws(module.Args(), known, known, World(rank, 3, None))
        draws.drawn = 10
        with patch.object(module, "gather", lambda values, world: torch.tensor([2, 0, 3])):
            assert [problem.prompt_ids[0] for problem in draws.problems(len(mine))] == mine
        assert draws.drawn == 15


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
MUTANTS = {
    "idle groups punished": ("mixed * overlong(", "overlong("),
    "old rows under new rewards": ("rows[:P][idle] = rows[P:]", "pass"),
}

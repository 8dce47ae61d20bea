"""What is held of each of exercises.py: name -> checks of a module that has the function, and a
hint to each."""

import itertools
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

float64 = torch.float64


class Pause(BaseException):
    """A rank waits for the others' part of a sum."""


def on_ranks(job: Callable, *each: tuple) -> list:
    """`job(*arguments, all_sum)` on as many ranks as there are arguments, in turns: a rank that
    needs a sum which is not known yet begins again when it is."""
    sums, done = [], [None] * len(each)
    for _ in range(50):
        asked: list[list[Tensor]] = []
        for rank, arguments in enumerate(each):
            calls = itertools.count()

            def all_sum(x: Tensor, calls: itertools.count = calls, asked: list = asked) -> Tensor:
                call = next(calls)
                if call < len(sums):
                    return sums[call].clone()
                asked.append(x.detach().clone())
                raise Pause

            try:
                done[rank] = job(*arguments, all_sum)
            except Pause:
                done[rank] = None
        if not asked:
            return done
        assert len(asked) == len(each), "not every rank calls all_sum equally often"
        sums.append(torch.stack(asked).sum(0))
    raise AssertionError("all_sum is called without end")


def check_temperature(module: ModuleType) -> None:
    """The log-probs are those of softmax(logits / temperature), over the whole vocabulary."""
    logits = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, -1.0]], dtype=float64)
    for temperature in (0.5, 1.0, 2.0):
        chances = (logits / temperature).exp()
        wanted = (chances / chances.sum(1, keepdim=True)).log()[[0, 1], [2, 1]]
        found = module.sampler_logprobs(logits, torch.tensor([2, 1]), temperature)
        assert found.shape == (2,) and torch.allclose(found.double(), wanted, atol=1e-6)


def check_large_logits(module: ModuleType) -> None:
    """Logits of 1000 and of -1000 give finite log-probs: no exp of a logit, no log of a 0."""
    logits = torch.tensor([[1000.0, 0.0], [-1000.0, 0.0]])
    found = module.sampler_logprobs(logits, torch.tensor([1, 0]), 1.0)
    assert torch.allclose(found, torch.tensor([-1000.0, -1000.0]))


def check_bfloat16(module: ModuleType) -> None:
    """bfloat16 logits are made float32 before the softmax, not after."""
    logits = torch.linspace(-1, 1, 1000).bfloat16()[None]
    found = module.sampler_logprobs(logits, torch.tensor([500]), 1.0)
    assert found.dtype != torch.bfloat16
    assert torch.allclose(found, logits.float().log_softmax(-1)[:, 500], atol=1e-4)


REWARDS = [torch.tensor([1.0, 0, 0], dtype=float64), torch.tensor([1, 0.5, 1], dtype=float64)]
GROUPS = [torch.tensor([0, 0, 1]), torch.tensor([1, 0, 1])]


def check_spread_groups(module: ModuleType) -> None:
    """Each group's z-score is over all its rows, wherever they are."""
    found = on_ranks(module.rank_advantages, *((r, g, 2) for r, g in zip(REWARDS, GROUPS)))
    rewards, groups = torch.cat(REWARDS), torch.cat(GROUPS)
    wanted = torch.empty_like(rewards)
    for group in (0, 1):
        own = rewards[groups == group]
        wanted[groups == group] = (own - own.mean()) / (own.std() + 1e-6)
    assert torch.allclose(torch.cat(found), wanted, atol=1e-9)


def check_rank_without_rows(module: ModuleType) -> None:
    """A rank without a row of some group, or without any, still takes part in every sum."""
    none = (torch.zeros(0, dtype=float64), torch.zeros(0, dtype=torch.long), 2)
    found = on_ranks(module.rank_advantages, (torch.cat(REWARDS), torch.cat(GROUPS), 2), none)
    assert found[1].shape == (0,) and found[0].isfinite().all()


def check_large_rewards(module: ModuleType) -> None:
    """Rewards of 10,000 and 10,001 in float32 have the z-scores of 0 and 1: the variance is not a
    difference of two large numbers."""
    rewards = torch.tensor([10000.0, 10001.0, 10001.0, 10000.0])
    found = on_ranks(module.rank_advantages, (rewards, torch.zeros(4, dtype=torch.long), 1))[0]
    assert torch.allclose(found.abs(), torch.tensor(0.8660), atol=1e-3)


def parts(parameter: Tensor, sizes: list[int], alive: list[int]) -> list[Callable]:
    """Micro-batches of (θ - i)² for tokens i = 0, 1, ...; `alive` counts graphs not yet freed."""
    starts = itertools.accumulate(sizes, initial=0)

    def micro(first: int, size: int) -> tuple[Tensor, Tensor]:
        assert not alive[0], "the last micro-batch's graph is still held: call backward first"
        alive[0] = 1
        parameter.register_hook(lambda _: alive.__setitem__(0, 0))
        targets = torch.arange(first, first + size, dtype=float64)
        return ((parameter - targets) ** 2).sum(), torch.tensor(float(size))

    return [lambda first=first, size=size: micro(first, size) for first, size in zip(starts, sizes)]


def check_any_division(module: ModuleType) -> None:
    """Micro-batches of 1 and 9 tokens give the gradient of the mean over ten, as one of 10 does."""
    for sizes in ([10], [1, 9], [3, 3, 4]):
        parameter = torch.tensor(2.0, dtype=float64, requires_grad=True)
        mean = module.accumulate(parameter, parts(parameter, sizes, [0]))
        tokens = torch.arange(10, dtype=float64)
        assert parameter.grad is not None, "parameter.grad is None"
        assert abs(parameter.grad - (2 * (2 - tokens)).mean()) < 1e-12, sizes
        assert abs(float(mean) - ((2 - tokens) ** 2).mean()) < 1e-12, sizes


def check_ess(module: ModuleType) -> None:
    """Equal weights give 1, a single heavy one 1/B, and the formula in between."""
    log_w = torch.tensor([0.1, -0.3, 0.7, 0.0], dtype=float64)
    w = log_w.exp()
    assert abs(module.ess_ratio(log_w) - w.sum() ** 2 / (4 * (w**2).sum())) < 1e-12
    assert abs(module.ess_ratio(torch.zeros(5)) - 1) < 1e-6


def check_ess_far_out(module: ModuleType) -> None:
    """log w of 500 or -500, all alike, give 1: a common factor is no matter."""
    for shift in (-500.0, 500.0):
        assert abs(module.ess_ratio(torch.full((4,), shift)) - 1) < 1e-4
    assert abs(module.ess_ratio(torch.tensor([300.0, 0, 0, 0])) - 0.25) < 1e-4


def check_pass_by_counting(module: ModuleType) -> None:
    """Over all choices of k of the n samples, the share with a right one among them."""
    for n, c, k in ((5, 2, 3), (6, 1, 2), (4, 0, 2), (4, 4, 1), (5, 3, 5), (7, 3, 1)):
        chosen = list(itertools.combinations([1] * c + [0] * (n - c), k))
        wanted = sum(any(pick) for pick in chosen) / len(chosen)
        assert abs(module.pass_at_k(n, c, k) - wanted) < 1e-12, (n, c, k)


def check_pass_of_many(module: ModuleType) -> None:
    """n = 10,000 neither overflows nor takes long."""
    assert abs(module.pass_at_k(10_000, 1, 5_000) - 0.5) < 1e-9
    assert abs(module.pass_at_k(10_000, 5_000, 1) - 0.5) < 1e-9


def check_columns(module: ModuleType) -> None:
    """The column before each response token, the prompt's last one first; no prompt, no padding."""
    sequences = torch.tensor([[5, 6, 7, 8, 2, 0], [5, 9, 2, 0, 0, 0]])
    predicts, tokens = module.shift(sequences, torch.tensor([2, 1]), torch.tensor([5, 3]))
    wanted = [[0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]
    assert predicts.long().tolist() == wanted
    assert tokens.tolist() == [7, 8, 2, 9, 2]


def check_full_row(module: ModuleType) -> None:
    """A response that ends in the last column, at the length limit, is whole too."""
    sequences = torch.tensor([[5, 6, 7, 8]])
    predicts, tokens = module.shift(sequences, torch.tensor([1]), torch.tensor([4]))
    assert predicts.long().tolist() == [[1, 1, 1, 0]] and tokens.tolist() == [6, 7, 8]


CHECKS = {
    "sampler_logprobs": {
        check_temperature: "divide the logits by the temperature before the softmax",
        check_large_logits: "log_softmax, not the log of a softmax",
        check_bfloat16: ".float() first: eight bits of mantissa are two digits",
    },
    "rank_advantages": {
        check_spread_groups: "sums per group (index_add), then all_sum, then divide",
        check_rank_without_rows: "no branch on what this rank has: the others wait for its part",
        check_large_rewards: "sum squares of (reward - mean), in a second all_sum",
    },
    "accumulate": {
        check_any_division: "add up sums and counts, divide once at the end: no mean of means"
    },
    "ess_ratio": {
        check_ess: "the sum's square over the sum of squares, and over B",
        check_ess_far_out: "logsumexp of log w and of 2 log w, exp only of the difference",
    },
    "pass_at_k": {
        check_pass_by_counting: "1 - C(n-c, k) / C(n, k); not 1 - (1 - c/n)^k",
        check_pass_of_many: "a product of ratios: the binomials overflow",
    },
    "shift": {
        check_columns: "column t predicts token t+1: begin one before the response",
        check_full_row: "the last token predicts nothing, and is predicted",
    },
}

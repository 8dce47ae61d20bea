"""The checks of exercises.py. CHECKS maps a name to checks of a module with that function. A
check's docstring is its hint."""

import itertools
from collections.abc import Callable
from types import ModuleType

import torch
from checks.harness import near
from torch import Tensor

float64 = torch.float64


class Pause(BaseException):
    """A rank's wait for the other ranks' parts of a sum."""


def on_ranks(job: Callable, *each: tuple) -> list:
    """Run `job(*arguments, all_sum)` in turns, on a rank for each element of `each`. A rank that
    needs an unknown sum begins again when the sum is known."""
    sums, done = [], [None] * len(each)
    for _ in range(50):
        terms: list[list[Tensor]] = []
        for rank, arguments in enumerate(each):
            calls = itertools.count()

            def all_sum(x: Tensor, calls: itertools.count = calls, terms: list = terms) -> Tensor:
                call = next(calls)
                if call < len(sums):
                    return sums[call].clone()
                terms.append(x.detach().clone())
                raise Pause

            try:
                done[rank] = job(*arguments, all_sum)
            except Pause:
                done[rank] = None
        if not terms:
            return done
        assert len(terms) == len(each), "not every rank calls all_sum equally often"
        sums.append(torch.stack(terms).sum(0))
    raise AssertionError("all_sum is called without end")


def check_temperature(module: ModuleType) -> None:
    """Expect log-probs of softmax(logits / temperature): divide before the softmax."""
    logits = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, -1.0]], dtype=float64)
    for temperature in (0.5, 1.0, 2.0):
        chances = (logits / temperature).exp()
        wanted = (chances / chances.sum(1, keepdim=True)).log()[[0, 1], [2, 1]]
        logp = module.sampler_logprobs(logits.clone(), torch.tensor([2, 1]), temperature)
        near(logp, wanted, f"logits {logits.tolist()}, tokens [2, 1], T = {temperature}", 1e-6)


def check_large_logits(module: ModuleType) -> None:
    """Expect finite log-probs for logits of 1000 and -1000: log_softmax, not the log of softmax."""
    logits = torch.tensor([[1000.0, 0.0], [-1000.0, 0.0]])
    logp = module.sampler_logprobs(logits, torch.tensor([1, 0]), 1.0)
    near(logp, [-1000.0, -1000.0], "logits [1000, 0], token 1, and [-1000, 0], token 0", 1e-3)


def check_logits_are_left(module: ModuleType) -> None:
    """Expect unchanged logits: logits / temperature, not logits /= temperature."""
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    module.sampler_logprobs(logits, torch.tensor([1]), 2.0)
    assert logits.tolist() == [[1, 2, 4]], f"[[1, 2, 4]] has become {logits.tolist()}"


def check_bfloat16(module: ModuleType) -> None:
    """Expect that bfloat16 logits become float32 before the softmax: .float() first."""
    logits = torch.linspace(-1, 1, 1000).bfloat16()[None]
    logp = module.sampler_logprobs(logits, torch.tensor([500]), 1.0)
    assert logp.dtype != torch.bfloat16, "the log-probs are bfloat16"
    wanted = logits.float().log_softmax(-1)[:, 500]
    near(logp, wanted, "of a thousand bfloat16 logits from -1 to 1 the 500th", 1e-4)


REWARDS = [torch.tensor([1.0, 0, 0], dtype=float64), torch.tensor([1, 0.5, 1], dtype=float64)]
GROUPS = [torch.tensor([0, 0, 1]), torch.tensor([1, 0, 1])]


def check_spread_groups(module: ModuleType) -> None:
    """Expect each group's z-score over all its rows: sums per group (index_add), then all_sum."""
    scores = on_ranks(module.rank_advantages, *((r, g, 2) for r, g in zip(REWARDS, GROUPS)))
    rewards, groups = torch.cat(REWARDS), torch.cat(GROUPS)
    wanted = torch.empty_like(rewards)
    for group in (0, 1):
        of_group = rewards[groups == group]
        wanted[groups == group] = (of_group - of_group.mean()) / (of_group.std() + 1e-6)
    case = "rewards 1, 0, 0 and 1, .5, 1 of groups 0, 0, 1 and 1, 0, 1"
    near(torch.cat(scores), wanted, case, 1e-9)


def check_rank_without_rows(module: ModuleType) -> None:
    """Expect a rank without rows, of one group or of all, to take part in every sum."""
    none = (torch.zeros(0, dtype=float64), torch.zeros(0, dtype=torch.long), 2)
    scores = on_ranks(module.rank_advantages, (torch.cat(REWARDS), torch.cat(GROUPS), 2), none)
    shape = list(scores[1].shape)
    assert shape == [0], f"a rank without rows gets {shape} advantages"
    assert scores[0].isfinite().all(), f"the other rank's are {scores[0].tolist()}"


def check_equal_rewards(module: ModuleType) -> None:
    """Expect 0, to 1e-6, for eight float32 rewards of 0.7 on two ranks and for a group of one:
    rounding must not be amplified."""
    rewards = torch.full((8,), 0.7), torch.full((1,), 0.7)
    groups = torch.tensor([0] * 7 + [1]), torch.tensor([0])
    scores = torch.cat(on_ranks(module.rank_advantages, *((*x, 2) for x in zip(rewards, groups))))
    near(scores, torch.zeros(9), "eight rewards of 0.7, and (at [7]) a group of one", 1e-6)


def check_large_rewards(module: ModuleType) -> None:
    """Expect the same z-scores for float32 rewards of 10,000 and 10,001 as for 0 and 1: the
    variance must not be a difference of two large numbers."""
    rewards = torch.tensor([10000.0, 10001.0, 10001.0, 10000.0])
    scores = on_ranks(module.rank_advantages, (rewards, torch.zeros(4, dtype=torch.long), 1))[0]
    near(scores, [-0.8660, 0.8660, 0.8660, -0.8660], "rewards 10000 and 10001, twice each", 1e-3)


def parts(parameter: Tensor, sizes: list[int], alive: list[int]) -> list[Callable]:
    """Make micro-batches of (θ - i)² for tokens i = 0, 1, ...; `alive` counts graphs in memory."""
    starts = itertools.accumulate(sizes, initial=0)

    def micro(first: int, size: int) -> tuple[Tensor, Tensor]:
        assert not alive[0], "the last micro-batch's graph is still held: call backward first"
        alive[0] = 1
        parameter.register_hook(lambda _: alive.__setitem__(0, 0))
        targets = torch.arange(first, first + size, dtype=float64)
        return ((parameter - targets) ** 2).sum(), torch.tensor(float(size))

    return [lambda first=first, size=size: micro(first, size) for first, size in zip(starts, sizes)]


def check_any_division(module: ModuleType) -> None:
    """Expect the gradient of the mean over ten tokens, however divided: divide once, at the end."""
    for sizes in ([1, 9], [3, 3, 4], [10]):
        parameter = torch.tensor(2.0, dtype=float64, requires_grad=True)
        mean = module.accumulate(parameter, parts(parameter, sizes, [0]))
        tokens = torch.arange(10, dtype=float64)
        assert parameter.grad is not None, "parameter.grad is None"
        where = f"of micro-batches of {sizes} tokens"
        near(parameter.grad, (2 * (2 - tokens)).mean(), f"the gradient {where}")
        near(mean, ((2 - tokens) ** 2).mean(), f"the mean loss {where}")


def check_ess(module: ModuleType) -> None:
    """Expect 1 for equal weights, and the formula for others."""
    log_w = torch.tensor([0.1, -0.3, 0.7, 0.0], dtype=float64)
    w = log_w.exp()
    wanted = w.sum() ** 2 / (4 * (w**2).sum())
    near(module.ess_ratio(log_w), wanted, f"log w = {log_w.tolist()}")
    near(module.ess_ratio(torch.zeros(5)), 1, "log w = 0, five times", 1e-6)


def check_ess_far_out(module: ModuleType) -> None:
    """Expect 1 if all log w are 500 or -500, and 1/B if one weight dwarfs the others: take exp of a
    difference of logsumexp only."""
    uneven = torch.tensor([0.0, -1, -2, -2])
    w = uneven.exp()
    for shift in (-500.0, 500.0):
        near(module.ess_ratio(torch.full((4,), shift)), 1, f"log w = {shift:g}, four times", 1e-4)
        wanted = w.sum() ** 2 / (4 * (w**2).sum())
        weights = f"log w = {[shift + x for x in uneven.tolist()]}"
        near(module.ess_ratio(uneven + shift), wanted, weights, 1e-3)
    near(module.ess_ratio(torch.tensor([300.0, 0, 0, 0])), 0.25, "log w = [300, 0, 0, 0]", 1e-4)


def check_pass_by_counting(module: ModuleType) -> None:
    """Expect the share of all choices of k from n that have a right one: not 1 - (1 - c/n)^k."""
    for n, c, k in ((5, 2, 3), (6, 1, 2), (4, 0, 2), (4, 4, 1), (5, 3, 5), (7, 3, 1)):
        chosen = list(itertools.combinations([1] * c + [0] * (n - c), k))
        wanted = sum(any(pick) for pick in chosen) / len(chosen)
        near(module.pass_at_k(n, c, k), wanted, f"n = {n}, c = {c}, k = {k}")


def check_pass_of_many(module: ModuleType) -> None:
    """Expect that n = 10,000 neither overflows nor takes long: a product of ratios."""
    near(module.pass_at_k(10_000, 1, 5_000), 0.5, "n = 10000, c = 1, k = 5000", 1e-9)
    near(module.pass_at_k(10_000, 5_000, 1), 0.5, "n = 10000, c = 5000, k = 1", 1e-9)


def shifted(module: ModuleType, rows: list, starts: list, ends: list, wanted: list) -> None:
    """Expect these columns, and the tokens that follow them."""
    sequences = torch.tensor(rows)
    predicts, tokens = module.shift(sequences.clone(), torch.tensor(starts), torch.tensor(ends))
    case = f"sequences {rows}, prompt_len {starts}, ends {ends}"
    assert predicts.shape == sequences.shape, f"{case}: predicts is {list(predicts.shape)}"
    columns = predicts.long().tolist()
    assert columns == wanted, f"{case}: predicts {columns}, expected {wanted}"
    assert predicts.dtype == torch.bool, f"{case}: predicts is of {predicts.dtype}, not of bool"
    behind = [row[t + 1] for row, on in zip(rows, wanted) for t in range(len(row)) if on[t]]
    assert tokens.tolist() == behind, f"{case}: tokens {tokens.tolist()}, expected {behind}"


def check_columns(module: ModuleType) -> None:
    """Expect the column before each response token, from the prompt's last, and no padding."""
    rows = [[5, 6, 7, 8, 2, 0], [5, 9, 2, 0, 0, 0]]
    shifted(module, rows, [2, 1], [5, 3], [[0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]])


def check_full_row(module: ModuleType) -> None:
    """Expect a response that ends in the last column, at the length limit, to be whole."""
    shifted(module, [[5, 6, 7, 8]], [1], [4], [[1, 1, 1, 0]])


def check_any_ids(module: ModuleType) -> None:
    """Expect that places count, not ids: a response may contain id 0, the padding's id, or an EOS
    in the middle, and an empty response predicts nothing."""
    rows = [[5, 0, 0, 7, 0, 2, 2], [0, 3, 2, 0, 2, 2, 2], [5, 6, 4, 2, 2, 2, 2]]
    wanted = [[0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0], [0] * 7]
    shifted(module, rows, [2, 1, 3], [6, 5, 3], wanted)


CHECKS = {
    "sampler_logprobs": [check_temperature, check_large_logits],
    "rank_advantages": [check_spread_groups, check_rank_without_rows],
    "accumulate": [check_any_division],
    "ess_ratio": [check_ess, check_ess_far_out],
    "pass_at_k": [check_pass_by_counting, check_pass_of_many],
    "shift": [check_columns, check_full_row, check_any_ids],
}
CHECKS["sampler_logprobs"] += [check_logits_are_left, check_bfloat16]
CHECKS["rank_advantages"] += [check_equal_rewards, check_large_rewards]

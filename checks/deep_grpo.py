"""DEEP-GRPO: the loss of two streams, pivots and their distribution, the regression."""

import math
import random
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from common.batch import Rollout
from common.distributed import ALONE
from torch import Tensor

from . import Run, grpo
from .formulas import Batch, clip_statistics, k3, surrogate, token_mean
from .harness import CENTRED, FIXTURE, near

AUTHORS = FIXTURE["deep_grpo"]["cases"]
statistics = clip_statistics


def objective(b: Batch) -> tuple[Tensor, Tensor]:
    """Main rows and branches are each averaged over their own tokens. λ weighs the branches' policy
    term, not their KL."""
    weight = torch.where(b.branch > 0, b.args.branch_weight, 1.0)[:, None]
    kl = b.args.beta * k3(b) if b.args.beta else 0.0
    x, main = weight * surrogate(b) - kl, b.branch == 0
    J, count = token_mean(x[main], b.mask[main])
    return J + token_mean(x[~main], b.mask[~main])[0], count


CASES = [{"clip_high": 0.28, "beta": 0.3, "branch_weight": 0.7}]
CASES += [{"clip_low": 0.3, "beta": 0.3, "kl_ratio": True}, {"beta": 0.0}]


def check_pivots(module: ModuleType) -> None:
    """Pivots are the root and every boundary except the response's last token."""
    assert module.pivots([1, 2, 9, 3, 9, 4], {9}) == [0, 3, 5]
    assert module.pivots([1, 9, 2, 9], {9}) == [0, 2]
    assert module.pivots([1, 8, 2, 9, 3], {8, 9}) == [0, 2, 4]
    assert module.pivots([4], {9}) == [0]


def check_pivot_distribution(module: ModuleType) -> None:
    """Q ∝ σ(u d + v) d^γ with d = (i+1)/(M+1), the probabilities with which the authors draw."""
    for case in AUTHORS:
        u, v = case["fit"] or (0.0, math.inf)
        Q = module.pivot_distribution(case["segments"], u, v, case["gamma"])[1]
        near(Q, torch.tensor(case["q"], dtype=torch.float64), "Q", 1e-10)


def check_choice_is_in_proportion(module: ModuleType) -> None:
    """In 6000 draws for a response of four segments, counts agree with Q, within four standard
    deviations."""
    response, rng = [1, 9, 1, 1, 9, 1, 9, 2], random.Random(0)
    _, q = module.pivot_distribution(4, -3.0, 2.0, 2.0)
    draws = [module.choose_pivot(response, {9}, -3.0, 2.0, 2.0, rng) for _ in range(6000)]
    for i, kept in enumerate((0, 2, 5, 7)):
        count = sum(draw == (kept, (i + 1) / 5) for draw in draws)
        assert abs(count - 6000 * q[i]) < 4 * (6000 * q[i] * (1 - q[i])) ** 0.5


def check_fit(module: ModuleType) -> None:
    """u and v are those of the authors' scikit-learn, to the tolerance of its optimiser. P = 1 for
    up to 10 outcomes, and if all are the same."""
    for case in AUTHORS:
        pairs = [(i / segments, float(success)) for i, segments, success in case["feedback"]]
        fit, expected = module.fit_success(pairs), case["fit"] or (0.0, math.inf)
        near(torch.tensor(fit).double(), torch.tensor(expected).double(), "u and v", 2e-3)


FIXTURES = {"bnpo_eps0.2_tokenmean": {}}  # without branches


def check_branches(module: ModuleType) -> None:
    """Failed responses are cut where their pivots and the fit say; an ending knows its parent."""
    cuts, requested = {6: 1, 7: 0, 8: 2}, []  # first token of a failed response: tokens kept
    rows = [[5, 9], [6, 9, 9], [7, 9, 1], [8, 9, 9]]

    def choose(response: list[int], ends: set, u: float, v: float, *more: object) -> tuple:
        assert (u, v) == (3.0, -1.0)
        return cuts[response[0]], 0.5

    def generate(prompts: list, n: int, limit: int, T: float, prefixes: list) -> Rollout:
        requested.extend(prefixes)
        tokens = [[4, i] for i in range(len(prompts) * n)]
        options = {"prefixes": prefixes, "eos": [1], "device": "cpu"}
        return Rollout.pack(prompts=prompts, tokens=tokens, logps=tokens, **options)

    def pack(tokens: list) -> Rollout:
        how = {"logps": tokens, "eos": [1], "device": "cpu"}
        return Rollout.pack(prompts=[[0], [0]], tokens=tokens, **how)

    outcome = torch.tensor([[1.0, 0], [0, 0], [0, 1]])
    branches = object.__new__(module.Branches)
    branches.args, branches.world = module.Args(branches=2, group_size=2), ALONE
    branches.engine, branches.ends = SimpleNamespace(generate=generate), {9}
    branches.feedback = [[0.5, 1.0]]
    branches.task = SimpleNamespace(score=lambda *_: outcome)
    problems = [SimpleNamespace(index=k, prompt_ids=[0]) for k in range(2)]
    fit = lambda pairs: (3.0 * len(pairs), -1.0)  # noqa: E731
    with mock.patch.multiple(module, fit_success=fit, choose_pivot=choose):
        used, _ = branches.grow(pack(rows), torch.tensor([[1.0, 0], [0, 0]]), problems)
    assert requested == [[6], [], [8, 9]]
    near(used.origin, [1, 1, 3, 3], "the parents of endings that have an advantage")
    assert [pair[1] for pair in branches.feedback] == [1.0, 1.0, 0.0, 1.0]


SHARED = [*CENTRED, grpo.check_coefficients, grpo.check_kl, grpo.check_kl_ratio]
RETURN = "return -per_response.sum(), mask[main].sum()"
LAMBDA = "torch.where(main, 1.0, args.branch_weight)"
MUTANTS = {
    "one stream": (" * torch.where(main, 1.0, branch)", ""),
    "branches in the main average": (RETURN, RETURN.replace("mask[main].sum()", "mask.sum()")),
    "λ on the KL": ("args.beta * k3", f"args.beta * {LAMBDA}[:, None] * k3"),
    "no estimate": ("torch.sigmoid(u * depth + v) *", "1.0 *"),
}


RUN = Run(
    stored={"branches": 2, "beta": 0.1, "branch_weight": 0.7, "grad_clip": 8.0},
    refuses=(("--boundary z", "--boundary 'z': no token ends in it"),),
)

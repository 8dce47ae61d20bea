"""The tree of the lab *bound*, and the estimators of the gradient that see the policy.

Responses have three tokens of two kinds, so there are 8 of them. The policy depends on the prefix
and has 14 logits. Everything is enumerated, so the lab does not sample. A seed is a policy and 3 of
the 8 responses, which are right.
"""

import itertools

import torch
from torch import Tensor

# Name -> what is credited, and what is subtracted. In whole responses R has the weight π/μ of the
# response; Q that of the tokens up to its own.
BOUNDS = {
    "no baseline, full weight": ("R", "none"),
    "R - p": ("R", "p"),  # the mean of an infinitely large group
    "R - best constant": ("R", "constant"),
    "R - V(s)": ("R", "V"),
    "R - best b(s)": ("R", "best"),
    "V(s') - V(s), λ = 0": ("Q", "V"),  # s', the state after a, has Q(s, a)
    "Q(s, a) - best b(s)": ("Q", "best"),
}
T, G = 3, 4
SEQUENCES = torch.tensor(list(itertools.product((0, 1), repeat=T)))  # [S, T]


def node(prefix: list[int]) -> int:
    """The place of a prefix in the tree: 0; 1, 2; 3 to 6."""
    place = 0
    for token in prefix:
        place = 2 * place + 1 + token
    return place


NODES = torch.tensor([[node(s[:t]) for t in range(T)] for s in SEQUENCES.tolist()])  # [S, T]


def problem(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The policy's logits `[7, 2]`, those of older parameters, and the reward of every response
    `[S]`."""
    logits = torch.randn(7, 2, generator=generator, dtype=torch.float64)
    older = logits - 0.7 * torch.randn(7, 2, generator=generator, dtype=torch.float64)
    right = torch.randperm(len(SEQUENCES), generator=generator) < 3
    return logits, older, right.double()


def policy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """log π of every token `[S, T]`, and its gradient by the logits `[S, T, 14]`."""
    table = logits.log_softmax(-1)  # [7, 2]
    score = torch.zeros(*NODES.shape, *table.shape, dtype=torch.float64)  # [S, T, 7, 2]
    rows, columns = torch.meshgrid(*map(torch.arange, NODES.shape), indexing="ij")
    score[rows, columns, NODES] = torch.eye(2).double()[SEQUENCES] - table.exp()[NODES]
    return table[NODES, SEQUENCES], score.flatten(2)


def at_nodes(values: Tensor, weights: Tensor) -> Tensor:
    """`[S, T]` -> the weighted mean at each token's node, again `[S, T]`."""
    zero = torch.zeros(7, dtype=torch.float64)
    total = zero.index_add(0, NODES.flatten(), (values * weights).flatten())
    return (total / zero.index_add(0, NODES.flatten(), weights.flatten()))[NODES]


def exact(name: str, logp: Tensor, old: Tensor, score: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """The mean `[14]` of an estimator of BOUNDS, and the variance of a mean of G responses."""
    credited, baseline = BOUNDS[name]
    pi, mu, full = logp.sum(1).exp(), old.sum(1).exp(), score.sum(1)  # [S], [S], [S, 14]
    w = (logp - old).cumsum(1).exp()  # [S, T]: of the prefix with this token
    what = R[:, None].expand(w.shape)  # [S, T]
    V = at_nodes(what, pi[:, None].expand(w.shape))  # [S, T]
    if credited == "Q":
        what = torch.cat([V[:, 1:], R[:, None]], 1)  # [S, T]
    else:
        w = w[:, -1:].expand(w.shape)  # [S, T]
    if baseline == "best":  # of every node, where the token's score has its own place
        b = at_nodes(what, mu[:, None] * w**2 * (score**2).sum(-1))  # [S, T]
    else:
        weights = mu * w[:, -1] ** 2 * (full**2).sum(1)  # [S]
        known = {"none": 0.0, "p": pi @ R, "constant": weights @ R / weights.sum(), "V": V}
        b = known[baseline]
    single = ((w * (what - b))[..., None] * score).sum(1)  # [S, 14]
    mean = mu @ single
    return mean, (mu @ (single**2).sum(1) - mean @ mean) / G

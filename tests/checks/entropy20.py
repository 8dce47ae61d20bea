"""80/20: outside numbers, which tokens are trained, and over what the quantile is."""

from types import ModuleType

import torch
from torch import Tensor

from . import COUNTED, FIXTURE, SHARE, ZSCORE, advantages_match, check_clip_statistics
from . import check_equal_rewards, gradient, loss_of, matches, no_kl, terms, toy_batch, weight
from . import written_here


def forks_of_the_fixture() -> Tensor:
    """The entropies `[6, 6]` that the fixture's top-20% case was given."""
    return (36 - torch.arange(36, dtype=torch.float64)).reshape(6, 6) / 10


def check_fixture(module: ModuleType) -> None:
    """Value and gradient are TRL's times 21/4: it divides by all tokens, not by those kept. (Of 21
    tokens five are at its threshold or above; it loses the fifth, which is the threshold, by
    rounding to float32. A share of 0.19 keeps the same four.)"""
    expected = FIXTURE["cases"]["dapo_eps0.2_top20pct_entropy"]
    batch = toy_batch() | {"entropy": forks_of_the_fixture()}
    batch["logp"].requires_grad_()
    loss, stats = loss_of(module, no_kl(module, clip_high=0.2, top_entropy=0.19), **batch)
    loss.backward()
    (out, tokens), wanted = stats["left_out"], torch.tensor(expected["grad"], dtype=torch.float64)
    assert (int(tokens - out), int(tokens)) == (4, 21)
    assert abs(loss.item() - expected["loss"] * 21 / 4) < 1e-8
    assert torch.allclose(batch["logp"].grad, wanted * 21 / 4, rtol=0, atol=1e-8)


def check_all_tokens(module: ModuleType) -> None:
    """With a share of 1 it is its base objective: DAPO's token mean, of outside numbers."""
    matches(module, "dapo_eps0.2_0.28_tokenmean", top_entropy=1.0)
    assert gradient(module, top_entropy=1.0)[0].abs().sum() > 0


def check_weights(module: ModuleType) -> None:
    """M r Â with ε 0.2 below and 0.28 above, on a token that is kept."""
    for advantage, ratio, expected in ((1, 1.25, 1.25), (1, 1.3, 0), (-1, 0.75, 0), (-1, 4, 4)):
        assert abs(weight(module, ratio, advantage) - advantage * expected) < 1e-12


def two_rows() -> dict[str, Tensor]:
    """Right and wrong, five tokens and three; padding has the largest entropies of all."""
    entropy = [[0.0, 2.0, 0.1, 0.3, 0.2], [0.05, 1.0, 0.4, 9.0, 9.0]]
    columns = {"entropy": entropy, "mask": [[1.0] * 5, [1.0] * 3 + [0.0] * 2]}
    columns |= {"logp": [[-1.0] * 5] * 2, "advantages": [1.0, -1.0]}
    batch = {name: torch.tensor(x, dtype=torch.float64) for name, x in columns.items()}
    return batch | {"old_logp": batch["logp"].clone()}


def check_trains_the_forks(module: ModuleType) -> None:
    """The upper quarter of eight tokens is 2.0 and 1.0: a right response's and a wrong one's, each
    with half the weight. Padding is in no quantile."""
    batch = two_rows()
    batch["logp"].requires_grad_()
    loss, stats = loss_of(module, no_kl(module, top_entropy=0.25), **batch)
    loss.backward()
    expected = torch.zeros(2, 5, dtype=torch.float64)
    expected[0, 1], expected[1, 1] = -0.5, 0.5
    assert torch.allclose(batch["logp"].grad, expected)
    assert stats["left_out"] == (6, 8)
    assert stats["fork_entropy"] == (3.0, 2)


def check_siblings_stay_together(module: ModuleType) -> None:
    """Equal entropies, but for rounding, are all kept or all left out."""
    batch = two_rows()
    batch["entropy"] = 1.0 + 1e-7 * torch.tensor([[3.0, 1, 4, 1, 5], [9, 2, 6, 0, 0]]).double()
    assert loss_of(module, no_kl(module), **batch)[1]["left_out"][0] == 0


def check_is_exact_in_parts(module: ModuleType) -> None:
    """With τ of the whole mini-batch, sums over any parts give the whole's loss; a part's own τ
    would not."""
    batch, args = two_rows(), no_kl(module, top_entropy=0.25)
    threshold = module.entropy_threshold(args, batch["entropy"][batch["mask"].bool()])
    assert 0.4 < threshold <= 1.0
    whole = terms(module, args, **batch)
    rows = [{name: x[i : i + 1] for name, x in batch.items()} for i in range(2)]
    split = [terms(module, args, **row, threshold=threshold) for row in rows]
    assert torch.isclose(sum(s[0] for s in split), whole[0])
    assert sum(s[1] for s in split) == whole[1]
    assert sum(terms(module, args, **row)[1] for row in rows) != whole[1]


def check_quantile_of_many(module: ModuleType) -> None:
    """A mini-batch may have more tokens than torch.quantile takes."""
    many = torch.arange(2**24 + 2).flip(0) / 2**24
    assert abs(module.entropy_threshold(module.Args(), many) - 0.8) < 1e-4


def check_advantages(module: ModuleType) -> None:
    """GRPO's z-score."""
    advantages_match(module, "ddof1_eps1e-6", 1e-8)


CHECKS = [*written_here(globals()), check_equal_rewards, check_clip_statistics]
RETURN, SURROGATE = "return -(objective * kept).sum(), kept.sum()", "torch.minimum("
FORKS = "entropy >= threshold - 1e-5"
MUTANTS = {
    **ZSCORE,
    **COUNTED,
    "no clip": ("torch.minimum(ratio * A, clipped * A)", "ratio * A"),
    "clip without min": ("torch.minimum(ratio * A, clipped * A)", "clipped * A"),
    "clip_share of what is left": (SHARE, SHARE.replace("cut * mask", "cut * kept")),
    "fork_entropy of all": ("((entropy * kept).sum()", "((entropy * mask).sum()"),
    "TRL's denominator": (RETURN, RETURN.replace("kept.sum()", "mask.sum()")),
    "the surest tokens": (FORKS, "entropy <= threshold + 1e-5"),
    "rounding parts siblings": (FORKS, "entropy >= threshold"),
    "the lower quantile": ("1 - args.top_entropy)", "args.top_entropy)"),
    "padding in the quantile": ("entropy[mask.bool()])", "entropy.flatten())"),
    "right responses only": ("kept = mask * forks", "kept = mask * (forks & (A > 0))"),
    "all tokens of the wrong ones": ("kept = mask * forks", "kept = mask * (forks | (A < 0))"),
    "own threshold in every part": ("if threshold is None:", "if True:"),
    "no mask": (RETURN, RETURN.replace("kept", "mask")),
    "symmetric clip": (
        "clamp(1 - args.clip_low, 1 + args.clip_high)",
        "clamp(1 - args.clip_low, 1 + args.clip_low)",
    ),
    "max for min": (SURROGATE, SURROGATE.replace("minimum", "maximum")),
    "sign": (RETURN, RETURN.replace("-(", "(")),
}

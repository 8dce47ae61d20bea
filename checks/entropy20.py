"""80/20: outside numbers, which tokens are trained, and over which tokens the quantile is. Clip-Cov
and KL-Cov: which tokens they choose by hand, the effect on them, and that a draw is the same in any
order."""

from types import ModuleType

import torch
from common.batch import Rollout
from common.distributed import ALONE
from torch import Tensor

from . import CLIP, FIXTURE, ZSCORE, ZSCORES, add_up, check_clip_statistics, counts, loss_of
from . import matches, mini_batch, near, no_kl, toy_batch, written_here


def forks_of_the_fixture() -> Tensor:
    """The entropies `[6, 6]` that the fixture's top-20% case was given."""
    return (36 - torch.arange(36, dtype=torch.float64)).reshape(6, 6) / 10


def check_fixture(module: ModuleType) -> None:
    """Value and gradient are TRL's times 21/4, because TRL divides by all tokens, not by the kept
    ones. (Of 21 tokens five are at its threshold or above. It loses the fifth, which is the
    threshold, by rounding to float32. A share of 0.19 keeps the same four.)"""
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
    """With a share of 1 it is its base objective: DAPO's token mean, with outside numbers."""
    matches(module, "dapo_eps0.2_0.28_tokenmean", top_entropy=1.0)


def two_rows() -> dict[str, Tensor]:
    """A right and a wrong response, of five and three tokens; padding has the largest entropies of
    all."""
    entropy = [[0.0, 2.0, 0.1, 0.3, 0.2], [0.05, 1.0, 0.4, 9.0, 9.0]]
    columns = {"entropy": entropy, "mask": [[1.0] * 5, [1.0] * 3 + [0.0] * 2]}
    columns |= {"logp": [[-1.0] * 5] * 2, "advantages": [1.0, -1.0]}
    batch = {name: torch.tensor(x, dtype=torch.float64) for name, x in columns.items()}
    return batch | {"old_logp": batch["logp"].clone()}


def check_siblings_stay_together(module: ModuleType) -> None:
    """Entropies that are equal except for rounding are all kept or all left out."""
    batch = two_rows()
    batch["entropy"] = 1.0 + 1e-7 * torch.tensor([[3.0, 1, 4, 1, 5], [9, 2, 6, 0, 0]]).double()
    assert loss_of(module, no_kl(module), **batch)[1]["left_out"][0] == 0


def check_is_exact_in_parts(module: ModuleType) -> None:
    """With the tokens that the whole mini-batch chooses, sums over any parts give the loss of the
    whole. With the choices of the parts they do not."""
    batch, args = two_rows(), no_kl(module, top_entropy=0.25)
    _, _, whole = mini_batch(module, args, **batch)
    add_up(module, args, batch, [[0], [1]], chosen=whole.chosen)


def surprised() -> dict[str, Tensor]:
    """Nine tokens of Â = 2, 2 and -1 and three of padding. The mean of log π is -2, that of Â 1:
    the covariances are 1.5, -1, 0; 1.2, -1.2, 0; -2, -1, 4. Two tokens have moved: the second row's
    first, to where the clip cuts it, and the third's last, to where the clip must not cut it."""
    logp = [[-0.5, -3.0, -2.0, 9.0], [-0.8, -3.2, -2.0, 9.0], [-1.0, -1.5, -4.0, 9.0]]
    columns = {"logp": logp, "advantages": [2.0, 2.0, -1.0], "mask": [[1.0, 1, 1, 0]] * 3}
    batch = {name: torch.tensor(x, dtype=torch.float64) for name, x in columns.items()}
    batch["old_logp"] = batch["logp"].clone()
    batch["old_logp"][1, 0] -= 0.5
    batch["old_logp"][2, 2] -= 0.4  # r = 1.49, and Â < 0
    return batch | {"entropy": 0 * batch["logp"] + 0.5}


def slope(module: ModuleType, **flags: object) -> tuple[Tensor, dict]:
    """-∂ loss / ∂ log π of these nine tokens, times their number; the statistics."""
    batch = surprised()
    batch["logp"].requires_grad_()
    loss, stats = loss_of(module, no_kl(module, **flags), **batch)
    loss.backward()
    return -9 * batch["logp"].grad, stats


def check_kl_cov(module: ModuleType) -> None:
    """The quarter of the largest covariances is 4, 1.5 and 1.2, whether the clip would cut them or
    not: r Â - κ sign(log r) there and r Â elsewhere, over all tokens."""
    found, stats = slope(module, tokens="kl_cov", kl_cov_share=0.25, kl_cov_coef=3.0)
    up, down = torch.tensor([0.5, 0.4], dtype=torch.float64).exp()
    expected = [[2.0, 2, 2, 0], [2 * up - 3, 2, 2, 0], [-1, -1, -down - 3, 0]]
    near(found, torch.tensor(expected), "the gradient weights of KL-Cov", 1e-9)
    assert stats["clip_share"] == (0, 9) and "left_out" not in stats
    counts(stats, {"held_share": (3, 9), "held_pull": (3 * 0.9, 3)})
    one, _ = slope(module, tokens="kl_cov")  # the largest, if the share is less than a token
    expected[1][0], expected[2][2] = 2 * up, -down - 1
    near(one, torch.tensor(expected), "the gradient weights of KL-Cov's default", 1e-9)


def check_clip_cov(module: ModuleType) -> None:
    """Between 1 and 5 are 1.5 and 4, and 1.2, which the clip has cut and which is not drawn. One or
    both lose their gradient. They still count, and the clip acts elsewhere."""
    expected = torch.tensor([[2.0, 2, 2, 0], [0, 2, 2, 0], [-1, -1, -1.4918246976412703, 0]])
    drawn = []
    for some, share in ((1, 2e-4), (1, 0.2), (2, 0.25), (2, 0.9)):
        found, stats = slope(module, tokens="clip_cov", clip_cov_share=share)
        lost = (found == 0) & (expected != 0)
        drawn.append(lost)
        near(found, expected * ~lost, "the gradient weights of Clip-Cov", 1e-6)
        assert lost.sum() == lost[0, 0].int() + lost[2, 2].int() == some
        counts(stats, {"left_out": (some, 9), "fork_entropy": ((9 - some) / 2, 9 - some)})
        assert stats["clip_share"] == (1, 9)
    assert drawn[-1][0, 0] and drawn[-1][2, 2]
    for bounds in ({"clip_cov_low": 2.0}, {"clip_cov_high": 2.0}):
        found, _ = slope(module, tokens="clip_cov", clip_cov_share=0.9, **bounds)
        assert (found[0, 0] == 0) == ("clip_cov_high" in bounds)
        assert (found[2, 2] == 0) == ("clip_cov_low" in bounds)
    none, stats = slope(module, tokens="clip_cov", clip_cov_low=4.5)
    near(none, expected, "the gradient weights where the band is empty", 1e-6)
    assert stats["left_out"] == (0, 9)


def check_the_draw(module: ModuleType) -> None:
    """The draw is the same for rows in any order, different in another step, and no place in the
    band is preferred."""
    generator = torch.Generator().manual_seed(3)
    logp = torch.randn(40, 5, generator=generator, dtype=torch.float64) - 3
    A = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(20)
    columns = {"logp": logp, "old_logp": logp, "entropy": 0 * logp, "mask": 0 * logp + 1}
    batch = Rollout(**columns, tokens=logp, advantages=A)
    flags = {"tokens": "clip_cov", "clip_cov_share": 0.05, "clip_cov_low": 0.1}
    args, order = no_kl(module, **flags), torch.randperm(40, generator=generator)
    mixed = batch.rows(order)
    hits = torch.zeros_like(logp)
    for step in range(60):
        for rows in (batch, mixed):
            module.choose_tokens(args, rows, rows.logp, rows.entropy, ALONE, step)
        chosen, again = batch.chosen, mixed.chosen
        assert chosen.sum() == 10 and torch.equal(again, chosen[order])
        hits += chosen
    c = (logp - logp.mean()) * A[:, None]
    band = hits[(c > 0.1) & (c < 5)][c[(c > 0.1) & (c < 5)].argsort()]
    assert band.sum() == 600 and (band > 0).double().mean() > 0.95
    assert 0.4 < band[: len(band) // 2].sum() / 600 < 0.6


READS = ("old_logp", "entropy")  # columns that the loss uses
CHECKS = [*written_here(globals()), *ZSCORES, check_clip_statistics]
RETURN = "return -(objective * trained).sum(), kept.sum()"
FORKS = "score >= top_threshold(share, pooled(score[on])) - 1e-5"
PULL = "pull = args.kl_cov_coef * (logp - batch.old_logp).abs() * chosen"
MUTANTS = {
    **ZSCORE,
    **CLIP,
    "TRL's denominator": (RETURN, RETURN.replace("kept.sum()", "mask.sum()")),
    "the surest tokens": (FORKS, FORKS.replace(">=", "<=").replace("- 1e-5", "+ 1e-5")),
    "padding in the quantile": (FORKS, FORKS.replace("score[on]", "score.flatten()")),
    "KL-Cov clips": ("objective = ratio * A - pull", "objective = objective - pull"),
    "pulled everywhere": (PULL, PULL.replace(" * chosen", "")),
    "what is drawn is not counted": (RETURN, RETURN.replace("kept.sum()", "trained.sum()")),
    "no upper bound": ("(pool < args.clip_cov_high)", "(pool < torch.inf)"),
    "drawn in the rows' order": (".sort().values\n    order", "\n    order"),
    "one draw for all steps": ("manual_seed(step)", "manual_seed(0)"),
    "sign": (RETURN, RETURN.replace("-(", "(")),
}

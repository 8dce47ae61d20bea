"""PMD: its gradient weight, and its optimum with every response enumerated."""

from types import ModuleType

import torch

from . import CENTRE, CENTRED, busy_batch, check_parts_add_up, counts, loss_of, near
from . import no_kl, toy_batch, two_responses, written_here


def per_response(batch: dict, args: object) -> tuple[torch.Tensor, torch.Tensor]:
    """log π_θ(y) / π_old(y) and Â - τ times that, `[n]` each."""
    log_ratio = ((batch["logp"] - batch["old_logp"]) * batch["mask"]).sum(1)
    return log_ratio, batch["advantages"] - args.tau * log_ratio


def check_weights(module: ModuleType) -> None:
    """Every token of a response has (Â - τ log π_θ(y)/π_old(y)) / L, in the mean over all
    responses."""
    for batch in (toy_batch(), two_responses()):
        for tau in (0.01, 0.7):
            args = no_kl(module, tau=tau, max_new_tokens=50)
            weight = per_response(batch, args)[1]
            logp = batch["logp"].clone().requires_grad_()
            loss_of(module, args, **batch | {"logp": logp})[0].backward()
            expected = -weight[:, None] * batch["mask"] / len(weight) / 50
            near(logp.grad, expected, f"∂ loss / ∂ log π at τ = {tau}")


def check_optimum(module: ModuleType) -> None:
    """With the true τ log Z instead of the mean, π* = π_old exp(R/τ) / Z has gradient 0, over all
    responses. With the mean it does not."""
    right, counted = torch.tensor([1.0, 0, 0, 1, 0, 1]).double(), torch.tensor([1, 7, 3, 4, 2, 3])
    rows, old = torch.repeat_interleave(torch.arange(6), counted), counted.double() / 20
    for tau in (0.2, 1.0):
        log_z = (old * (right / tau).exp()).sum().log()
        theta = (old.log() + right / tau - log_z).requires_grad_()
        logp = theta.log_softmax(0)[rows][:, None]
        batch = {"logp": logp, "old_logp": old.log()[rows][:, None], "mask": 0 * logp.detach() + 1}
        sizes = []
        for baseline in (tau * log_z, (old * right).sum()):
            advantages = (right - baseline)[rows]
            loss = loss_of(module, no_kl(module, tau=tau), **batch, advantages=advantages)[0]
            sizes.append(torch.autograd.grad(loss, theta, retain_graph=True)[0].norm())
        assert sizes[0] < 1e-12, f"τ = {tau}: the gradient at the optimum is {sizes[0]:.3g}"
        assert sizes[1] > 1e-5


def check_statistics(module: ModuleType) -> None:
    """pull is τ |log ratio| divided by |Â|, each summed over responses. turned counts, among those
    with Â ≠ 0, the responses whose weight no longer has the sign of Â."""
    batch, args = busy_batch(), no_kl(module, tau=3.0)
    log_ratio, weight = per_response(batch, args)
    A = batch["advantages"]
    turned = (A != 0) & (weight.sign() * A.sign() < 0)
    assert 0 < turned.sum() < (A != 0).sum()
    expected = {"pull": (3 * log_ratio.abs().sum(), A.abs().sum())}
    expected["turned"] = turned.sum(), (A != 0).sum()
    counts(loss_of(module, args, **batch)[1], expected)


CHECKS = [*written_here(globals()), *CENTRED, check_parts_add_up]
RATIO, SQUARE = (
    "((logp - batch.old_logp) * mask).sum(dim=1, keepdim=True)",
    "args.tau / 2 * log_ratio**2",
)
RETURN = "return -objective.sum() / args.max_new_tokens, mask.new_tensor(len(mask)), stats"
MUTANTS = {
    **CENTRE,
    "no square": (f"A * log_ratio - {SQUARE}", "A * log_ratio"),
    "pushed away": (f"- {SQUARE}", f"+ {SQUARE}"),
    "the square detached": (SQUARE, f"({SQUARE}).detach()"),
    "mean for sum": (RATIO, f"{RATIO} / mask.sum(dim=1, keepdim=True)"),
    "padding in the ratio": (RATIO, "(logp - batch.old_logp).sum(dim=1, keepdim=True)"),
    "μ for π_old": (RATIO, RATIO.replace("old_logp", "rollout_logp")),
    "token-mean": (RETURN, RETURN.replace("mask.new_tensor(len(mask))", "mask.sum()")),
    "sign": (RETURN, RETURN.replace("-objective", "objective")),
    "pull without τ": ("(args.tau * log_ratio.abs()", "(log_ratio.abs()"),
}

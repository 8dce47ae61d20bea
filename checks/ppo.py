"""PPO: GAE by another formula, the value loss, and an advantage for each token."""

from types import ModuleType

import torch
from common.batch import Rollout
from common.distributed import World
from common.logprobs import response_logprobs
from common.model import load_model
from torch import Tensor

from . import SIDES, TOKEN_MEAN, busy_batch, check_parts_add_up, clipped, counts, loss_of
from . import matches, near, no_kl, one, response_tokens, toy_batch, weighs, written_here


def random_rows(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and mask `[5, 7]`: rows of 7, 4, 1 and 6 tokens, padded; one with a gap."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    mask = (torch.arange(7) < torch.tensor([7, 4, 1, 6, 7])[:, None]).double()
    mask[4, 2:5] = 0.0
    return rewards, values, mask


def check_gae_is_a_mean_of_returns(module: ModuleType) -> None:
    """GAE is a mean of returns that look n tokens ahead and then use the critic, n = 1, 2, ....
    Their weights are (1 - λ) λ^(n-1), and the whole return has the rest. Padding and gaps are no
    tokens; λ may differ by row."""
    rewards, values, mask = random_rows()
    lams = torch.tensor([0.7, 0.0, 0.5, 1.0, 0.3], dtype=torch.float64)
    for gamma in (1.0, 0.8):
        expected = torch.zeros_like(values)
        for row, lam in enumerate(lams.tolist()):
            at = mask[row].nonzero()[:, 0].tolist()
            r, V = rewards[row, at].tolist(), [*values[row, at].tolist(), 0.0]
            for t in range(len(at)):
                left, mean = len(at) - t, 0.0
                for n in range(1, left + 1):
                    ahead = sum(gamma**k * r[t + k] for k in range(n)) + gamma**n * V[t + n]
                    mean += ahead * lam ** (n - 1) * (1 - lam if n < left else 1)
                expected[row, at[t]] = mean
        found, returns = module.advantages(rewards, values, mask, gamma, lams)
        near(returns, expected, f"returns at γ = {gamma}")
        near(found, (expected - values) * mask, f"advantages at γ = {gamma}")


def a_batch(**columns: Tensor) -> Rollout:
    """Two responses of 3 and 1 tokens, with rewards 1 and 0."""
    batch = Rollout.pack(
        prompts=[[2, 3], [4]],
        tokens=[[5, 6, 1], [7]],
        logps=[[-0.1, -0.2, -0.3], [-0.4]],
        eos=[1],
        device="cpu",
    )
    vars(batch).update({"rewards": torch.tensor([1.0, 0.0])} | columns)
    return batch


def check_token_rewards(module: ModuleType) -> None:
    """R at the last token, minus β log(π_old/π_ref) at each token; padding has none."""
    old = torch.tensor([[-0.1, -0.2, -0.3], [-0.4, -9.0, -9.0]])
    ref = torch.tensor([[-0.3, -0.1, -0.3], [-0.2, -5.0, -1.0]])
    batch = a_batch(old_logp=old, ref_logp=ref)
    near(module.token_rewards(batch, 0.0), torch.tensor([[0.0, 0, 1], [0, 0, 0]]), "at β = 0")
    expected = torch.tensor([[-0.1, 0.05, 1], [0.1, 0, 0]])
    near(module.token_rewards(batch, 0.5), expected, "at β = 0.5", 1e-6)


def check_value_loss(module: ModuleType) -> None:
    """1/2 max{(V - V̂)², (clip(V) - V̂)²}, V clipped to V_old ± 0.2. Its gradient is 0 if V has
    left that range towards V̂ and is not as far beyond it."""
    V = one(0.5, 0.9, 0.1, 0.9, 1.4, 0.0).requires_grad_()
    old, returns = one(0.5, 0.5, 0.5, 0.5, 0.5, 0.0), one(1.0, 1.0, 1.0, 0.0, 1.0, 9.0)
    loss, stats = module.value_loss(V, old, returns, one(1.0, 1, 1, 1, 1, 0), 0.2)
    loss.backward()
    near(loss, (0.5**2 + 0.3**2 + 0.9**2 + 0.9**2 + 0.4**2) / 2, "the sum")
    near(V.grad, one(-0.5, 0, -0.9, 0.9, 0.4, 0), "∂ loss / ∂ V")
    counts(stats, {"value_loss": (loss.detach(), 5), "value_clipped": (1, 5)})


def check_moments(module: ModuleType) -> None:
    """Mean and sample variance of the tokens of all parts, without padding."""
    generator = torch.Generator().manual_seed(0)
    columns = [5 + torch.randn(3, 4, generator=generator).double() for _ in range(2)]
    masks = [(torch.arange(4) < torch.tensor(n)[:, None]).double() for n in ([4, 1, 2], [3, 3, 0])]
    mean, variance = module.moments(columns, masks, World(0, 1, torch.device("cpu")))
    tokens = torch.cat([x[mask > 0] for x, mask in zip(columns, masks)])
    near(mean, tokens.mean(), "the mean", 1e-9)
    near(variance, tokens.var(), "the variance", 1e-9)


def check_value_of_the_state_before(module: ModuleType) -> None:
    """V is 0 before training. Then it is one number of the state in which each token is drawn: it
    depends on the prompt and earlier tokens, not on the token itself, later ones or padding."""
    lm, _ = load_model("tiny")
    value, batch = module.Value(lm), a_batch()
    near(response_logprobs(value, batch, 1.0)[0], torch.zeros(2, 3), "V at first")
    torch.nn.init.normal_(value.head.weight, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = response_logprobs(value, batch, 0.7)[0]
        for row, ids in enumerate(([2, 3, 5, 6, 1], [4, 7])):
            prompt = int(batch.prompt_len[row])
            for t in range(len(ids) - prompt):
                hidden = lm.base_model(torch.tensor([ids[: prompt + t]])).last_hidden_state[0, -1]
                where = f"V of row {row}, token {t}"
                near(found[row, t], (hidden @ value.head.weight.T)[0], where, 1e-4)
    near(found[1, 1:], torch.zeros(2), "V on padding")
    assert found.abs().min(dim=1).values[0] > 0.01


def check_an_advantage_for_each_token(module: ModuleType) -> None:
    """With advantages `[n, T]` each token has its own: the gradient weight is r Â_t inside the
    clip, and 0 outside in the direction of its own sign."""
    batch, generator = toy_batch(), torch.Generator().manual_seed(0)
    A = torch.randn(batch["mask"].shape, generator=generator, dtype=torch.float64)
    logp = batch["logp"].requires_grad_()
    loss_of(module, no_kl(module), **batch | {"advantages": A})[0].backward()
    r = (logp - batch["old_logp"]).exp().detach()
    cut = ((A > 0) & (r > 1.2)) | ((A < 0) & (r < 0.8))
    expected = -(~cut * r * A * batch["mask"]) / batch["mask"].sum()
    near(
        logp.grad, expected, "∂ loss / ∂ log π of the toy batch, an advantage for each token", 1e-9
    )


def check_fixture(module: ModuleType) -> None:
    """With DAPO's ε value and gradient agree with TRL, OpenRLHF and others."""
    matches(module, "dapo_eps0.2_0.28_tokenmean", clip_high=0.28)


def check_weights(module: ModuleType) -> None:
    """M r Â with ε 0.2 on both sides."""
    for ratio in (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 4.0):
        weighs(module, ratio, 1.0, ratio if ratio < 1.2 else 0.0)
        weighs(module, ratio, -1.0, -ratio if ratio > 0.8 else 0.0)


def check_clip_statistics(module: ModuleType) -> None:
    """clip_share is the share of response tokens that lose their gradient by the clip; clip_above
    and clip_below are its two sides."""
    batch = busy_batch()
    expected = clipped(response_tokens(batch), 0.2, 0.28)
    stats = loss_of(module, no_kl(module, clip_high=0.28), **batch)[1]
    counts(stats, {f"clip_{name}": pair for name, pair in expected.items()})


CHECKS = [*written_here(globals()), check_parts_add_up]
SURPRISE = "surprise = rewards[:, t] + gamma * following - values[:, t]"
FOLLOWING = "following = torch.where(here, values[:, t], following)"
LOSS = "0.5 * (torch.maximum(free, held) * mask).sum()"
MUTANTS = {
    **SIDES,
    **TOKEN_MEAN,
    "forwards in time": (
        "for t in reversed(range(values.shape[1])):",
        "for t in range(values.shape[1]):",
    ),
    "no V ahead": (SURPRISE, SURPRISE.replace("gamma * following", "0 * following")),
    "V of padding": (FOLLOWING, "following = values[:, t]"),
    "returns without V": ("(found + values) * mask", "found * mask"),
    "R at the first token": (
        "batch.mask.cumsum(1) == batch.mask.sum(1, keepdim=True)",
        "batch.mask.cumsum(1) == 1",
    ),
    "the KL as a prize": ("found - beta * (batch.old_logp", "found + beta * (batch.old_logp"),
    "the smaller error": (LOSS, LOSS.replace("maximum", "minimum")),
    "moments with padding": ("x = (column * mask).double()", "x = column.double()"),
    "random head": ("nn.init.zeros_(self.head.weight)", "pass"),
    "V of the token itself": (
        "output.last_hidden_state[predicts]",
        "output.last_hidden_state.roll(-1, dims=1)[predicts]",
    ),
}

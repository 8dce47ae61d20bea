"""PPO: GAE by another formula, the value loss, and an advantage for each token."""

from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from common.batch import Rollout
from common.distributed import ALONE
from torch import Tensor

from . import Run
from .formulas import Batch, clipped, cut_shares, token_mean
from .harness import near, as_row


def objective(b: Batch) -> tuple[Tensor, Tensor]:
    """J is PPO's clipped objective with an advantage for each token."""
    return token_mean(clipped(b.r, b.token_advantages, b.args), b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """clip_share and its sides, clip_above and clip_below, are shares of all response tokens."""
    return cut_shares(b, b.token_advantages)


CASES = [{}, {"clip_low": 0.5, "clip_high": 0.05}]


def check_gae_is_a_mean_of_returns(module: ModuleType) -> None:
    """GAE is a mean of returns that look n tokens ahead and then use the critic, n = 1, 2, ....
    Their weights are (1 - λ) λ^(n-1), and the whole return has the rest. Padding and gaps do not
    count as tokens, and λ may differ by row."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    mask = (torch.arange(7) < torch.tensor([7, 4, 1, 6, 7])[:, None]).double()
    mask[4, 2:5] = 0.0
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
        A, returns = module.advantages(rewards, values, mask, gamma, lams)
        near(returns, expected, f"returns at γ = {gamma}")
        near(A, (expected - values) * mask, f"advantages at γ = {gamma}")


def check_token_rewards(module: ModuleType) -> None:
    """A token's reward is -β log(π_old/π_ref), plus R at the last token. Padding has none."""
    batch = SimpleNamespace(
        mask=torch.tensor([[1.0, 1, 1], [1, 0, 0]]),
        rewards=torch.tensor([1.0, 0.0]),
        old_logp=torch.tensor([[-0.1, -0.2, -0.3], [-0.4, -9.0, -9.0]]),
        ref_logp=torch.tensor([[-0.3, -0.1, -0.3], [-0.2, -5.0, -1.0]]),
    )
    near(module.token_rewards(batch, 0.0), torch.tensor([[0.0, 0, 1], [0, 0, 0]]), "at β = 0")
    expected = torch.tensor([[-0.1, 0.05, 1], [0.1, 0, 0]])
    near(module.token_rewards(batch, 0.5), expected, "at β = 0.5", 1e-6)


def check_value_loss(module: ModuleType) -> None:
    """The loss is 1/2 max{(V - V̂)², (clip(V) - V̂)²}, with V clipped to V_old ± 0.2. Its gradient
    is 0 if V has left that range towards V̂ and is not as far beyond V̂."""
    V = as_row(0.5, 0.9, 0.1, 0.9, 1.4, 0.0).requires_grad_()
    old, returns = as_row(0.5, 0.5, 0.5, 0.5, 0.5, 0.0), as_row(1.0, 1.0, 1.0, 0.0, 1.0, 9.0)
    loss, clipped = module.value_loss(V, old, returns, as_row(1.0, 1, 1, 1, 1, 0), 0.2)
    loss.backward()
    near(loss, (0.5**2 + 0.3**2 + 0.9**2 + 0.9**2 + 0.4**2) / 2, "the sum")
    near(V.grad, as_row(-0.5, 0, -0.9, 0.9, 0.4, 0), "∂ loss / ∂ V")
    near(clipped, 1, "tokens that the clip leaves without a gradient")


def check_judge(module: ModuleType) -> None:
    """The policy's advantages use `--lam`, the critic's targets `--lam_critic`. Advantages are
    whitened over the tokens of all mini-batches."""
    critic, generator = object.__new__(module.Critic), torch.Generator().manual_seed(1)
    critic.args = module.Args(gamma=0.95, lam=0.5, lam_critic=0.9, beta=0.0)
    critic.world, critic.value = ALONE, None
    values, mask = torch.rand(4, 5, generator=generator), torch.ones(4, 5)
    rewards = torch.tensor([1.0, 0, 0, 1])
    whole = Rollout(
        rewards=rewards, mask=mask, old_logp=values, advantages=rewards, row=values, tokens=mask
    )
    parts = whole.split(2)
    with mock.patch.object(module, "all_logprobs", lambda _, b, *more: SimpleNamespace(logp=b.row)):
        critic.judge(parts)
    by_token = torch.cat([torch.zeros(4, 4), rewards[:, None]], dim=1)
    known = by_token, values, mask, 0.95
    returns = torch.cat([part.returns for part in parts])
    near(returns, module.advantages(*known, 0.9)[1], "the critic's targets", 1e-6)
    A = module.advantages(*known, 0.5)[0]
    whitened = torch.cat([part.token_advantages for part in parts])
    near(whitened, (A - A.mean()) / A.std(), "the policy's advantages", 1e-4)


def check_privileged(module: ModuleType) -> None:
    """With `--privileged` the critic reads the answer and an EOS before each prompt, and judges the
    same tokens. Without it the critic reads the batch as it is."""
    batch = Rollout.pack(
        prompts=[[5], [6, 7]],
        tokens=[[8, 1], [9, 9, 1], [4], [3, 1]],
        logps=[[0.0] * n for n in (2, 3, 1, 2)],
        eos=[1],
        device="cpu",
    )
    problems = [SimpleNamespace(answer=answer) for answer in ("47", "2")]

    def encode(text: str, **_: object) -> dict:
        return {"input_ids": [10 + int(digit) for digit in text]}

    tokenizer = mock.Mock(side_effect=encode, eos_token_id=1)
    critic = object.__new__(module.Critic)
    for privileged, prompts in ((True, [[14, 17, 1, 5], [12, 1, 6, 7]]), (False, [[5], [6, 7]])):
        critic.args = module.Args(privileged=privileged)
        if privileged:
            module.show_answers(batch, problems, 2, tokenizer)
        seen, sampled = critic.reads(batch), batch.response_ids()
        for row, sequence in enumerate(seen.sequences.tolist()):
            expected = prompts[row // 2] + sampled[row]
            near(sequence[: len(expected)], expected, f"row {row}, privileged: {privileged}")
        ends = [len(prompts[row // 2] + sampled[row]) for row in range(4)]
        near(seen.ends, ends, f"where rows end, privileged: {privileged}")


RUN = Run(
    stored={"critic_lr": 3e-3, "gamma": 0.95, "lam": 0.8, "lam_critic": 0.9, "beta": 0.1}
    | {"value_clip": 0.05, "grad_clip": 4.0, "critic_warmup": 1, "steps": 3},
    small="--critic_warmup 1",
    learns_in=15,  # the critic learns alone for five
)

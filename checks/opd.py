"""OPD: its gradient is exactly that of the reverse KL; the effect of w and the reward; the
teacher."""

from dataclasses import replace
from types import ModuleType, SimpleNamespace

import torch
from common.cli import BadInput
from common.distributed import ALONE
from common.logprobs import Policy
from torch import Tensor

from . import TOKEN_MEAN, ZSCORE, ZSCORES, busy_batch, check_parts_add_up, counts, loss_of, near
from . import one, outcome, response_tokens, written_here


def check_without_a_teacher(module: ModuleType) -> None:
    """With β = 0 no teacher is needed, and only the reward counts: α Â."""
    logp = one(0.2).log().requires_grad_()
    given = {"old_logp": logp.detach(), "mask": one(1.0), "advantages": one(0.7)[0]}
    alone = replace(module.Args(), beta=0.0, reward_weight=1.0)
    loss, stats = loss_of(module, alone, logp=logp, **given)
    loss.backward()
    near(logp.grad, one(-0.7), "without a teacher, α = 1: ∂ loss / ∂ log π")
    assert "teacher_kl" not in stats, "teacher_kl without a teacher"


def distributions() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the student and log-probs of teacher and sampler: 5 tokens each."""
    generator = torch.Generator().manual_seed(3)
    theta, teacher, mu = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    return theta, teacher.log_softmax(0), (theta + 0.3 * mu).log_softmax(0)


def mean_gradient(module: ModuleType, draws: Tensor, mu: Tensor, **flags: object) -> Tensor:
    """The mean gradient over tokens drawn by `draws [V]`, computed over all tokens."""
    theta, teacher, _ = distributions()
    theta.requires_grad_()
    logp = theta.log_softmax(0)[:, None]  # [V, 1]: a response for each token
    args = replace(module.Args(), **flags)
    total = 0.0
    for token in range(len(theta)):
        rows = {"logp": logp, "old_logp": logp.detach(), "rollout_logp": mu[:, None]}
        rows |= {"ref_logp": teacher[:, None]}
        rows = {name: x[token : token + 1] for name, x in rows.items()}
        loss, _ = loss_of(module, args, **rows, advantages=one(token)[0], mask=one(1.0))
        total = total + draws[token] * loss
    return torch.autograd.grad(total, theta)[0]


def check_is_the_gradient_of_the_reverse_kl(module: ModuleType) -> None:
    """In the mean over the policy's own tokens the gradient is that of KL(π_θ ‖ π_T), derived by
    autograd. With w this also holds over another sampler's tokens; without w it does not. By
    default the reward has no effect."""
    theta, teacher, mu = distributions()
    theta.requires_grad_()
    pi = theta.log_softmax(0)
    (expected,) = torch.autograd.grad((pi.exp() * (pi - teacher)).sum(), theta)
    own = mean_gradient(module, pi.exp().detach(), pi.detach())
    near(own, expected, "over the policy's own tokens the gradient, against that of the KL")
    other = mean_gradient(module, mu.exp(), mu)
    near(other, expected, "over another sampler's tokens, with w = π_θ/μ")
    assert (mean_gradient(module, mu.exp(), mu, weights="none") - expected).norm() > 1e-2


def check_six_responses(module: ModuleType) -> None:
    """A whole batch in which μ, π_old, π_θ and π_T all differ and w exceeds C = 1.3."""
    batch = busy_batch()
    args = replace(module.Args(), is_cap=1.3, beta=0.7, reward_weight=0.4)
    w = (batch["logp"] - batch["rollout_logp"]).exp().clamp(max=1.3)
    assert (w[batch["mask"] > 0] == 1.3).any()
    A = 0.7 * (batch["ref_logp"] - batch["logp"]) + 0.4 * batch["advantages"][:, None]
    expected = -w * A * batch["mask"] / batch["mask"].sum()
    near(outcome(module, batch, args)[1], expected, "∂ loss / ∂ log π of six responses", 1e-9)


def check_statistics(module: ModuleType) -> None:
    """Of all response tokens: teacher_kl is log(π_θ/π_T), not times β; weight the mean capped w;
    weight_max the largest w before the cap."""
    batch, t = busy_batch(), response_tokens(busy_batch())
    expected = {"teacher_kl": (-t.ref.sum(), t.M)}
    expected |= {"weight": (t.w.clamp(max=1.2).sum(), t.M), "weight_max": (t.w.max(), None)}
    counts(loss_of(module, replace(module.Args(), is_cap=1.2, beta=0.5), **batch)[1], expected)
    other = loss_of(module, replace(module.Args(), weights="none"), **batch)[1]
    counts(other, {"weight": (t.M, t.M)}, " where w is 1")


def check_strayed(module: ModuleType) -> None:
    """strayed is the share of response tokens after one with log π_T < -4.6 (a hundredth). That
    token itself does not count."""
    probs = [[0.5, 0.009, 0.9, 0.9], [0.9, 0.9, 0.011, 0.5], [0.001, 0.001, 0.9, 0.9]]
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.float64)
    teacher = torch.tensor(probs, dtype=torch.float64).log()
    batch = {"logp": 0 * mask, "old_logp": 0 * mask, "ref_logp": teacher, "mask": mask}
    stats = loss_of(module, module.Args(), **batch, advantages=one(0.0, 0.0, 0.0)[0])[1]
    counts(stats, {"strayed": (4, 11)})


def check_teacher(module: ModuleType) -> None:
    """The teacher is the requested model, frozen. It is refused if it numbers the student's tokens
    differently or reads fewer tokens than prompt and response. With β = 0 none is loaded."""
    args, loaded = module.Args(dtype="float32"), module.load_model("tiny-teacher")
    policy = module.frozen_teacher(args, loaded[1], ALONE)
    assert isinstance(policy, Policy) and not any(p.requires_grad for p in policy.parameters())
    pairs = zip(policy.lm.parameters(), loaded[0].parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs), "these are not the teacher's weights"
    assert module.frozen_teacher(replace(args, beta=0.0, teacher="none"), loaded[1], ALONE) is None
    words = loaded[1].get_vocab()
    shifted = {word: number + 1 for word, number in words.items()}
    fewer = {word: number for word, number in words.items() if word != "#"}
    for vocabulary, reads, right in (
        (shifted, 256, False),
        (words | {"x": 99}, 256, False),
        (words, 300, False),
        (fewer, 256, True),  # a teacher may know more tokens
    ):
        student = SimpleNamespace(get_vocab=vocabulary.copy, model_max_length=reads)
        try:
            module.frozen_teacher(args, student, ALONE)
            refused = False
        except BadInput as error:
            assert str(error).startswith("--teacher tiny-teacher: "), f"says {error}"
            refused = True
        told = f"a student of {len(vocabulary)} tokens that reads {reads}"
        assert refused != right, f"{told} is {'' if refused else 'not '}refused"


READS = ("rollout_logp",)  # columns that the loss uses
CHECKS = [*written_here(globals()), *ZSCORES, check_parts_add_up]
APART = "teacher_logp - logp.detach()"
WEIGHT, CAPPED = "(logp.detach() - batch.rollout_logp).exp()", "uncapped.clamp(max=args.is_cap)"
MUTANTS = {
    **ZSCORE,
    **TOKEN_MEAN,
    "the teacher's difference not detached": (APART, "teacher_logp - logp"),
    "the student leads the teacher": (
        "batch.teacher_logp - logp.detach()",
        "logp.detach() - batch.teacher_logp",
    ),
    "the reward thrown away": ("A = A + args.beta * apart", "A = args.beta * apart"),
    "weight not detached": (WEIGHT, WEIGHT.replace("logp.detach()", "logp")),
    "no bound on w": (CAPPED, "uncapped"),
    "w always": ('if args.weights == "mu"', "if args.weights"),
    "the foreign token itself": (
        "foreign.cumsum(dim=1) - foreign > 0",
        "foreign.cumsum(dim=1) > 0",
    ),
    "strayed on padding": ("- foreign > 0) * mask", "- foreign > 0)"),
    "the student is the teacher": (
        'load_model(args.teacher, world, "--teacher")',
        'load_model(args.model, world, "--teacher")',
    ),
}

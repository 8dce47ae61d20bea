"""The judge knows our losses in other words, names known mistakes, and accuses nothing else."""

import pytest
from common.cli import BadInput
from labs.judge import judge

HEAD = "import torch\ndef mean(x, m): return (x * m).sum(1) / m.sum(1).clamp(min=1)\ndef loss("
GRPO = """lp_new, prev_lps, reference_logps, advs, resp_mask, cliprange, kl_coef, config=None):
    new, old, ref, m, eps = lp_new, prev_lps, reference_logps, resp_mask, cliprange
    A = advs[:, None]
    r = (new - old).exp()
    x = torch.min(r * A, r.clamp(1 - eps, 1 + eps) * A)
    gap = ref - new
    x = x - kl_coef * (gap.exp() - gap - 1)
    return -mean(x, m).mean()
"""
MIN = "torch.min(r * A, r.clamp(1 - eps, 1 + eps) * A)"
DUAL = "torch.where(A < 0, torch.max(x, 3 * A), x)"
NO_EOS = "m = m * (m.cumsum(1) < m.sum(1, keepdim=True))"
WHITE = "((advs - advs.mean()) / (advs.std() + 1e-8))[:, None]"
K3 = "(gap.exp() - gap - 1)"
ALL_MEAN = "mean(x, m).mean()"
# A part of GRPO, what it becomes, and what is said; at the end, what cannot be judged
CHANGES = {
    "k3 reversed": ("ref - new", "new - ref", "with k3, β 0.1, except for this: KL direction."),
    "as it is": ("gap", "gap", "RIGHT: the loss of grpo.py --clip_low 0.15 --clip_high 0.15 (resp"),
    "token mean": (ALL_MEAN, "(x * m).sum() / m.sum()", "(token mean) with k3, β 0.1, in value"),
    "a constant": (ALL_MEAN, "(x * m).sum() / 9 / 512", "(sum / (N 512)) with k3, β 0.1, in va"),
    "only a gradient": ("return ", "return 1 ", "RIGHT: the gradient is that of grpo.py"),
    "Â squared": ("advs[:, None]", "advs[:, None] ** 2", "NONE of our losses"),
    "negated": ("return -", "return ", "NEGATED: minus the loss of grpo.py"),
    "no min": (MIN, "r.clamp(1 - eps, 1 + eps) * A", "except for this: clip without min."),
    "max for min": ("torch.min", "torch.max", "except for this: max for min."),
    "dual clip": ("gap =", f"x = {DUAL}; gap =", "except for this: a dual clip at 3."),
    "upside down": ("new - old", "old - new", "except for this: π_old/π_θ for π_θ/π_old."),
    "summed": ("(new - old)", "((new - old) * m).sum(1, keepdim=True)", "this: sequence ratio."),
    "ε ignored": ("1 - eps, 1 + eps", "0.8, 1.2", "except for this: ε at its default."),
    "whitened": ("advs[:, None]", WHITE, "except for this: Â whitened again"),
    "no EOS": ("    A =", f"    {NO_EOS}; A =", "except for this: dropped EOS"),
    "no mask": ("mean(x, m)", "x", "except for this: mask forgotten; KL: mask forgotten."),
    "k1 reversed": (K3, "gap", "except for this: KL: k1 for k3; KL of the wrong sign."),
    "KL detached": (K3, f"{K3}.detach()", "except for this: KL without gradient."),
    "β ignored": ("kl_coef *", "0.04 *", "β 0.04, except for this: β is not the 0.1"),
    "logits": ("lp_new,", "logits,", "logits is no argument that is known here"),
    "two of one kind": ("lp_new,", "lp_new, lps,", "lp_new and lps all look like log-probs of π_θ"),
    "no scalar": (".mean()\n", "\n", "it returns [9]: return one number"),
    "log of 0": ("return -", "return (0 * r).log().sum() - ", "NaN or infinite: look for 0/0"),
    "no gradient": ("new - old)", "new - old).detach()", "no gradient reaches log π"),
    "chosen by Â": ("kl_coef *", "kl_coef * (A * new < A.mean()) *", "no verdict: a weight"),
}
COV = "(new - new[m > 0].mean()) * (A - A.expand_as(m)[m > 0].mean()) * m"
# Whole functions, and what is said; our nine are in other words, without deep_grpo's branches
OTHERS = {
    "gspo.py": """new, old, advs, m, eps):
    s = mean(new - old, m).exp()
    return -torch.min(s * advs, s.clip(1 - eps, 1 + eps) * advs).mean()""",
    "sapo.py": """new, old, advs, m, tau_pos=1.0, tau_neg=1.05):
    r, A = torch.exp(new - old), advs[:, None]
    t = torch.where(A > 0, tau_pos, tau_neg)
    return -mean(4 / t / (1 + torch.exp(t * (1 - r))) * A, m).mean()""",
    "stapo.py": """new, old, advs, m, entropies):
    r, A = torch.exp(new - old), advs[:, None]
    sure = entropies < entropies[m > 0].quantile(0.8) - 1e-5
    m = m * ~(sure & (A > 0) & (new.exp() < 0.002))
    return -(torch.min(r * A, r.clip(0.8, 1.28) * A) * m).sum() / m.sum()""",
    "maspo.py": """new, old, advs, m):
    r, A = torch.exp(new - old), advs[:, None]
    w = (-0.3 * old).exp().clip(1, 10) * torch.where(A > 0, 1 + 0.03 * A, 1 / (1 - 0.03 * A))
    d = (r - 1).detach()
    gate = torch.where(A * d > 0, torch.exp(-((d / w) ** 2) / 2), 1)
    return -(gate * r * A * m).sum() / m.sum()""",
    "minirl.py": """new, old, sampler_lps, advs, m):
    r, A = torch.exp(new - old), advs[:, None]
    w = (new - sampler_lps).exp().clip(max=5).detach()
    out = (A > 0) & (r > 1.28) | (A < 0) & (r < 0.8)
    return -(w * ~out * A * new * m).sum() / len(A)""",
    "vcpo.py": """new, sampler_lps, advs, m, max_weight):
    w = ((new - sampler_lps) * m).sum(1).exp().clip(max=max_weight).detach()
    return -(w * advs * mean(new, m)).mean()""",
    "entropy20.py --tokens kl_cov": f"""new, old, advs, m):
    r, A = torch.exp(new - old), advs[:, None]
    most = {COV} == ({COV}).max()
    return -((r * A - (new - old).abs() * most) * m).sum() / m.sum()""",
    "[P, G]: R - the batch's mean.": "rewards): return rewards - rewards.mean()",
    "NaN or infinity": "r): return (r - r.mean(1, True)) / r.std(1, keepdim=True)",
    "group's mean.": "rewards): return [x - sum(rewards) / len(rewards) for x in rewards]",
}


def told(source: str, tmp_path, capsys) -> str:
    try:
        judge(tmp_path / "mine.py", HEAD + source, "loss")
    except BadInput as error:
        return str(error)
    return capsys.readouterr().out


SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in CHANGES if case != "k3 reversed"]


@pytest.mark.parametrize("case", ["k3 reversed", *SLOW])
def test_a_loss_and_its_mistakes_are_named(case, tmp_path, capsys):
    old, new, words = CHANGES[case]
    assert words in told(GRPO.replace(old, new, 1), tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("words", OTHERS)
def test_ours_in_other_words_and_advantages(words, tmp_path, capsys):
    verdict = told(OTHERS[words], tmp_path, capsys)
    assert words in verdict and verdict.startswith(("RIGHT", "Rewards")), verdict

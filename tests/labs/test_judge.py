"""The judge knows our losses in other words, names known mistakes, and accuses nothing else."""

import pytest
from labs import judge
from labs.grade import judged

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
KL = "k3 (response mean, β 0.1), except for this: KL"
# A part of GRPO, what it becomes, and what is said
CHANGES = {
    "as it is": ("", "", "RIGHT: the loss of grpo.py (response mean, clip 0.15/0.15) with the KL"),
    "token mean": ("mean(x, m).mean()", "(x * m).sum() / m.sum()", "justrl.py (token mean, clip"),
    "a constant": ("mean(x, m).mean()", "(x * m).sum() / 9 / 512", "dr_grpo.py (sum / (N 512), "),
    "twice": ("-mean(x, m)", "-2 * mean(x, m)", "(response mean, times 2, clip 0.15/0.15)"),
    "[N, 1]": ("advs[:, None]", "advs", "RIGHT: the loss of grpo.py (response mean"),
    "only a gradient": ("return ", "return 1 ", "RIGHT: the gradient is that of grpo.py"),
    "Â squared": ("advs[:, None]", "advs[:, None] ** 2", "NONE of our losses"),
    "root of |y|": ("mean(x, m).mean()", "((x * m).sum(1) / m.sum(1).sqrt()).mean()", "NONE of"),
    "negated": ("return -", "return ", "NEGATED: minus the loss of grpo.py"),
    "no min": (MIN, "r.clamp(1 - eps, 1 + eps) * A", "except for this: clip without min."),
    "no clip": (MIN, "r * A", "except for this: no clip."),
    "max for min": ("torch.min", "torch.max", "except for this: max for min."),
    "dual clip": ("gap =", f"x = {DUAL}; gap =", "except for this: a dual clip at 3."),
    "upside down": ("new - old", "old - new", "except for this: π_old/π_θ for π_θ/π_old."),
    "log r": ("(new - old).exp()", "new - old", "except for this: log r for r."),
    "summed": ("(new - old)", "((new - old) * m).sum(1, keepdim=True)", "this: sequence ratio."),
    "ε ignored": ("1 - eps, 1 + eps", "0.8, 1.2", "clip 0.2/0.2) with the KL term k3"),
    "whitened": ("advs[:, None]", WHITE, "except for this: Â whitened again"),
    "no EOS": ("    A =", f"    {NO_EOS}; A =", "except for this: dropped EOS"),
    "no mask": ("mean(x, m)", "x", "except for this: mask forgotten; KL: mask forgotten."),
    "k3 reversed": ("ref - new", "new - ref", f"{KL} direction."),
    "k1": (K3, "-gap", f"{KL}: k1 for k3."),
    "k1 reversed": (K3, "gap", f"{KL}: k1 for k3; KL of the wrong sign."),
    "k2": (K3, "gap**2 / 2", f"{KL}: k2 for k3."),
    "KL's sign": ("x - kl", "x + kl", f"{KL} of the wrong sign."),
    "KL detached": (K3, f"{K3}.detach()", "except for this: KL without gradient."),
    "KL to π_old": ("ref - new", "old - new", f"{KL} to π_old."),
    "β ignored": ("kl_coef *", "0.04 *", "KL with another β than the 0.1 that it was given."),
}
# Our nine in other words, after the line of r; goldilocks.py has the loss of grpo.py
CLIPPED = "torch.min(r * A, r.clip(0.8, 1.2) * A) * m"
NINE = {
    "gspo": """advs, m, eps
    s = mean(new - old, m).exp()
    return -torch.min(s * advs, s.clip(1 - eps, 1 + eps) * advs).mean()""",
    "sapo": """advs, m, tau_pos=1.0, tau_neg=1.05
    t = torch.where(A > 0, tau_pos, tau_neg)
    return -mean(4 / t / (1 + torch.exp(t * (1 - r))) * A, m).mean()""",
    "stapo": """advs, m, entropies
    sure = entropies < entropies[m > 0].quantile(0.8) - 1e-5
    m = m * ~(sure & (A > 0) & (new.exp() < 0.002))
    return -(torch.min(r * A, r.clip(0.8, 1.28) * A) * m).sum() / m.sum()""",
    "maspo": """advs, m
    w = (-0.3 * old).exp().clip(1, 10) * torch.where(A > 0, 1 + 0.03 * A, 1 / (1 - 0.03 * A))
    d = (r - 1).detach()
    x = torch.where(A * d > 0, torch.exp(-((d / w) ** 2) / 2), 1) * r * A * m
    return -x.sum() / m.sum()""",
    "minirl": """sampler_lps, advs, m
    w = (new - sampler_lps).exp().clip(max=5).detach()
    out = (A > 0) & (r > 1.28) | (A < 0) & (r < 0.8)
    return -(w * ~out * A * new * m).sum() / len(A)""",
    "vcpo": """sampler_lps, advs, m, max_weight
    w = ((new - sampler_lps) * m).sum(1).exp().clip(max=max_weight).detach()
    return -(w * advs * mean(new, m)).mean()""",
    "deep_grpo": f"""advs, m, is_branch, branch_weight
    x, n, b = ({CLIPPED}).sum(1), m.sum(1), is_branch > 0
    return -x[~b].sum() / n[~b].sum() - branch_weight * x[b].sum() / n[b].sum()""",
}
ADVANTAGES = {
    "(rewards - rewards.mean(1, keepdim=True))": "[P, G]: R - the group's mean.",
    "rewards - rewards.mean()": "[P, G]: R - the batch's mean.",
    "(rewards - rewards.mean(0)) / rewards.std(0)": "Equal rewards give NaN or infinity",
    "[x - sum(rewards) / len(rewards) for x in rewards]": "a list: R - the group's mean.",
}
# What cannot be judged: a part of GRPO, what it becomes, and what is said
REFUSED = {
    "an argument": ("advs, r", "advs, foo, r", "foo is no argument that is known here: rename it"),
    "logits": ("lp_new,", "logits,", "its token is 0"),
    "config": ("=None", "", "config is no argument that is known"),
    "two of one kind": ("lp_new,", "lp_new, lps,", "lp_new and lps all look like log-probs of π_θ"),
    "no scalar": (".mean()\n", "\n", "it returns a tensor of shape [9]: return one number"),
    "NaN": ("return -", "return 0 / 0 * x.detach().sum() * 0 - ", "ZeroDivisionError at line 10"),
    "log of 0": ("return -", "return (0 * r).log().sum() - ", "NaN or infinite: look for 0/0"),
    "no gradient": ("new - old)", "new - old).detach()", "no gradient reaches log π"),
    "an exception": ("torch.min", "torch.mn", "AttributeError at line 7"),
    "syntax": ("return -", "return ) -", "line 10 is not Python"),
}


def told(source: str, tmp_path, capsys) -> str:
    code = judged(tmp_path / "mine.py", HEAD + source, "loss")
    said = capsys.readouterr()
    lines = said.out or said.err
    assert code == (2 if said.err else int("RIGHT" not in lines and "Rewards" not in lines))
    return lines


QUICK = ("k3 reversed",)
BY_TIME = [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in CHANGES]


@pytest.mark.parametrize("case", BY_TIME)
def test_a_loss_and_its_mistakes_are_named(case, tmp_path, capsys):
    old, new, words = CHANGES[case]
    assert words in told(GRPO.replace(old, new, 1) if old else GRPO, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", NINE)
def test_ours_in_other_words(name, tmp_path, capsys):
    asked, _, body = NINE[name].partition("\n")
    start = "    r, A = torch.exp(new - old), advs[:, None]\n"
    said = told(f"new, old, *, {asked}):\n{start}{body}\n", tmp_path, capsys)
    assert said.startswith(f"RIGHT: the loss of {name}.py"), said


@pytest.mark.parametrize("code", ADVANTAGES)
def test_advantages(code, tmp_path, capsys):
    assert ADVANTAGES[code] in told(f"rewards): return {code}\n", tmp_path, capsys)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_judged_is_told(case, tmp_path, capsys):
    old, new, words = REFUSED[case]
    assert words in told(GRPO.replace(old, new, 1), tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "gspo", "minirl"])
def test_a_file_with_our_interface(name, capsys):
    path = judge.PATHS[name]
    assert judged(path, path.read_text("utf-8"), "policy_loss") == 0
    assert f"RIGHT: the loss of {name}.py" in capsys.readouterr().out

"""The gradient weight on ∇ log π against the ratio, for every objective and both signs of the advantage.

    python docs/weights.py        writes docs/weights.png

Nothing is drawn from a formula: each curve is the autograd gradient of that file's own `policy_loss` on one-token
responses. For gspo the ratio is then the sequence ratio; minirl is shown without train-inference gap (μ = π_old).
"""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402, F401  (before torch)
import matplotlib  # noqa: E402
import torch  # noqa: E402

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

CURVES = [  # file, label, π_old of the token, its entropy (only stapo and maspo look at these)
    ("grpo", "GRPO: clip 0.2 / 0.2", 0.1, 1.0, {"beta": 0.0}),
    ("gspo", "GSPO: clip 3e-4 / 4e-4 on the sequence", 0.1, 1.0, {}),
    ("sapo", "SAPO: τ 1.0 / 1.05", 0.1, 1.0, {}),
    ("stapo", "STAPO: clip 0.2 / 0.28", 0.1, 1.0, {}),
    ("stapo", "STAPO: a spurious token", 0.0001, 0.1, {}),
    ("maspo", "MASPO: common token, π_old 0.9", 0.9, 1.0, {}),
    ("maspo", "MASPO: rare token, π_old 0.01", 0.01, 1.0, {}),
    ("minirl", "MiniRL: mask 0.2 / 0.27", 0.1, 1.0, {}),
]


def weights(name: str, ratios: torch.Tensor, sign: float, old: float, entropy: float, flags: dict) -> torch.Tensor:
    """c(r, Â = sign) `[N]`, one response of one token for each ratio `[N]`."""
    module = importlib.import_module(name)
    old_logp = torch.full((len(ratios), 1), old, dtype=torch.float64).log()  # [N, 1]
    logp = (old_logp + ratios[:, None].log()).requires_grad_()  # [N, 1]
    mask = torch.ones_like(old_logp)
    extra = {"threshold": torch.tensor(0.5)} if name == "stapo" else {}
    total, _, _ = module.policy_loss(
        replace(module.Args(), **flags),
        logp=logp,
        old_logp=old_logp,
        rollout_logp=old_logp,
        entropy=torch.full_like(mask, entropy),
        advantages=sign * mask[:, 0],
        mask=mask,
        **extra,
    )
    return -torch.autograd.grad(total, logp)[0][:, 0]


def main() -> None:
    ratios = torch.linspace(0.02, 3.0, 3000, dtype=torch.float64)
    figure, axes = pyplot.subplots(2, 4, figsize=(17, 7.5), layout="constrained", sharex=True, sharey=True)
    for axis, (name, label, old, entropy, flags) in zip(axes.flat, CURVES):
        for sign, colour in ((1.0, "tab:blue"), (-1.0, "tab:red")):
            axis.plot(ratios, sign * ratios, color="0.8", linestyle="--", linewidth=1)
            axis.plot(ratios, weights(name, ratios, sign, old, entropy, flags), color=colour, label=f"Â = {sign:+.0f}")
        axis.axvline(1.0, color="0.8", linewidth=1)
        axis.set_title(label, fontsize=11)
        axis.set(xlabel="ratio π_θ/π_old", ylabel="weight on ∇ log π")
        axis.label_outer()
        axis.grid(alpha=0.3)
    axes[0, 0].legend(loc="upper left")
    figure.suptitle("Gradient weight against the ratio (dashed: the ratio itself, no clip at all)")
    figure.savefig(ROOT / "docs" / "weights.png", dpi=80)


if __name__ == "__main__":
    main()

"""Tokens and weights of the sizes, measured as labs/real measures SmolLM2's.

    python -m labs.ladder.panels

It writes runs/labs/ladder/signs.json: some minutes on one core.
"""

from checks.files import ROOT
import torch

from labs import lab
from labs.ladder.start import PARAMETERS, model
from labs.real.panels import Panels, after
from labs.real.responses import Subject, stored

LATE = 16  # updates


def measured(size: str, seed: int) -> dict[str, list[float]]:
    """Each number with its 95% interval over prompts."""
    torch.set_num_threads(1)
    subject = Subject(model(size), "arithmetic", 3e-4, 64, prompts=64)
    panels = Panels(
        subject, seed, stored(ROOT / f"runs/labs/ladder/{size}-{seed}.pt", subject, seed)
    )
    panels.stapo()
    first = {name: found for name, found in panels.numbers.items() if name.startswith("stapo")}
    for steps in panels.updated():
        logp, pull = panels.squared()
        log_ratio = (logp - panels.batch.old_logp) * panels.mask  # [N, T]
        panels.ess(steps, log_ratio)
        kl = panels.share(log_ratio.expm1() - log_ratio, panels.mask[:, :1])
        panels.numbers[f"minirl: KL of a response, {after(steps)}"] = kl
        if steps == LATE:
            panels.clips(after(steps), logp, pull)
            panels.stapo()  # again, with the policy as it is now
            for name in first:
                panels.numbers[f"{name}, {after(steps)}"] = panels.numbers[name]
    panels.numbers |= first
    return {name: [float(f"{x:.3g}") for x in found] for name, found in panels.numbers.items()}


if __name__ == "__main__":
    found = {size: [measured(size, seed) for seed in range(1, 6)] for size in PARAMETERS}
    lab.write(ROOT / "runs/labs/ladder/signs.json", found)

"""Do the critics of SP3O and BPCO explain more, and is a policy better for it?

One response to each of 128 prompts, so that no group can be a baseline: ppo.py, its flags for the
two papers' critics, the batch's mean, and the two controls in which critic and mean alone differ.
And 16 groups of eight, which sample as many tokens: grpo.py, and RLOO with a token mean. At the
usual learning rate and at three times the rate.

    python -m labs.critic
"""

import sys


from labs import lab

TITLE = "With one response to a prompt a critic helps where the rate is too large"
RUN = "--steps 100 --eval_every 10 --eval_problems 256 --eval_samples 2 --save_every 1000"
ONE = f"{RUN} --prompts_per_step 128 --group_size 1"
BPCO = "--bounded_value --no_whiten --lam_critic 1 --lam_length 0.4 --beta 0 --critic_lr 1.5e-3"
METHODS = {
    "groups of eight": f"grpo.py {RUN} --prompts_per_step 16 --group_size 8",
    "groups, token mean": f"-m variants.baselines {RUN} --prompts_per_step 16 --group_size 8",
    "the batch's mean": f"-m variants.baselines {ONE} --baseline batch",
    "the same, ppo.py's clip": f"-m variants.baselines {ONE} --baseline batch --clip_high 0.2",
    "ppo.py": f"-m variants.ppo {ONE}",
    "ppo.py, no KL": f"-m variants.ppo {ONE} --beta 0",
    "SP3O's critic": f"-m variants.ppo {ONE} --sparse_value --critic_lr 1.2e-3 --critic_warmup 20",
    "BPCO's critic": f"-m variants.ppo {ONE} {BPCO} --critic_warmup 15",
}
RATES = {"usual rate": "3e-4", "three times": "9e-4"}
ARMS = {f"{m}, {rate}": f"{METHODS[m]} --lr {RATES[rate]}" for rate in RATES for m in METHODS}
COLUMNS = ("sampled", "tokens", "explained_variance")
DRAWN = [name for name in METHODS if name not in ("the same, ppo.py's clip", "ppo.py, no KL")]
COLOURS = dict(zip(DRAWN, (lab.BLACK, lab.PINK, lab.GREY, lab.BLUE, lab.ORANGE, lab.GREEN)))
SEEDS = 5


def explained(run: dict) -> float | None:
    """The critic's explained variance, mean over steps 41 to 100."""
    values = run.get("explained_variance", [])
    return lab.tail(values, 60) if len(values) else None


def rows(results: dict) -> list[list[str]]:
    numbers = {
        "accuracy, last three": (lambda run: lab.tail(run["sampled"], 3), ".2f"),
        "best": (lab.high("sampled"), ".2f"),
        "at 250 thousand tokens": (lambda run: lab.at_tokens(run, 250), ".2f"),
        "explained variance": (explained, ".2f"),
        "thousand tokens": (lambda run: sum(run["tokens"]) / 1000, ".0f"),
    }
    return lab.table(results, numbers)


def draw(results: dict) -> object:
    words = "accuracy, usual rate", "accuracy, three times", "explained variance, three times"
    figure, axes = lab.sheet(TITLE, *words, width=12.0)
    for axis, rate in zip(axes, RATES):
        for method, colour in COLOURS.items():
            lab.bands(axis, results[f"{method}, {rate}"], "sampled", colour)
        axis.set_ylim(0.4, 0.95)
    for method, colour in list(COLOURS.items())[3:]:
        runs = results[f"{method}, three times"]
        lab.bands(axes[2], runs, "explained_variance", colour, width=9)
    axes[2].set_ylim(-0.1, 0.4)
    lab.key(axes[0], COLOURS, x=0.45)
    axes[2].axhline(0, color=lab.GREY, linewidth=0.8)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])

"""Small trials of sentences about stability, on the embedded model.

Going back: grpo.py at three times its learning rate rises and falls; from before, at and after the
top it goes on unchanged, with a third of the rate, or with ten times β. STAPO: other tokens than
its own are silenced. SAPO: other temperatures. Few right samples: a task that the model solves once
in twenty samples. Cold starts: three models that work and err differently. A critic: one response
to each of 128 prompts, and eight to each of 16.

    python -m labs.trials
"""

import sys

import numpy as np

from labs import lab

TITLE = "After a fall a third of the learning rate recovers, ten times β does not"
FLAGS = "--eval_every 10 --eval_samples 2 --save_every 1000"
FAST = f"--lr 1e-3 --steps 60 {FLAGS}"  # three times the usual rate: runs rise and fall
LONG = FAST.replace("60", "100")
ARMS = {}
DAMAGE = {}

# A change after step 10, 20 or 40, or none. Accuracy is highest after about 20 steps
ARMS["back: unchanged"] = f"grpo.py {LONG}"
for step in (10, 20, 40):
    ARMS[f"back: step {step}, lr / 3"] = f"-m labs.trials.turn {step} lr 0.3333 grpo.py {LONG}"
    ARMS[f"back: step {step}, 10 β"] = f"-m labs.trials.turn {step} beta 10 grpo.py {LONG}"
ARMS["back: lr / 3 from the start"] = f"grpo.py {LONG.replace('1e-3', '3.333e-4')}"

# Which tokens of right responses are silenced
SPURIOUS = "batch.spurious = candidates & sure  # [m, T]"
RIGHT = "(batch.advantages[:, None] > 0) & mask"
SHARE = f"(candidates & sure).sum() / ({RIGHT}).sum().clamp(min=1)"
SILENCED = {
    "both tests (STAPO)": "candidates & sure",
    "none": "candidates & False",
    "low probability": "candidates",
    "low entropy": f"{RIGHT} & sure",
    "low probability, high entropy": "candidates & ~sure",
    "as many at random": f"{RIGHT} & (torch.rand_like(batch.logp) < {SHARE})",
}
STAPO = f"stapo.py {FAST} --tau_p 0.05 --entropy_quantile 0.95"  # so that it acts here
for name, rule in SILENCED.items():
    ARMS[f"stapo: {name}"] = STAPO
    DAMAGE[f"stapo: {name}"] = SPURIOUS, f"batch.spurious = {rule}"
ARMS["stapo: both tests, τ_h of candidates"] = f"{STAPO} --entropy_rule candidates"
for tau in ("0.002", "0.01", "0.2"):
    ARMS[f"stapo: both tests, τ_p = {tau}"] = STAPO.replace("0.05", tau)

# SAPO's temperatures
for pos, neg in (("1", "1"), ("1", "1.05"), ("1", "2"), ("2", "1"), ("5", "5"), ("0.2", "0.2")):
    ARMS[f"sapo: τ_pos = {pos}, τ_neg = {neg}"] = f"sapo.py {FAST} --tau_pos {pos} --tau_neg {neg}"

# One right response in twenty
COLUMN = "A = batch.advantages[:, None]  # [n, 1]: one advantage for all tokens of a response"
RARE = f"grpo.py --task labs/trials/hard.py --beta 0 --max_new_tokens 112 --steps 60 {FLAGS}"
TRUE = "batch.advantages.clamp(min=0)"  # Â of right responses, else 0
WRONG = "batch.advantages.clamp(max=0)"
WEIGHTS = {
    "all samples": "A = batch.advantages[:, None]",
    "right ones only": f"A = {TRUE}[:, None]",
    "wrong ones only": f"A = {WRONG}[:, None]",
    "right ones times 10": f"A = ({WRONG} + 10 * {TRUE})[:, None]",
    "right ones times 0.1": f"A = ({WRONG} + 0.1 * {TRUE})[:, None]",
}
for name, line in WEIGHTS.items():
    ARMS[f"few right: {name}"] = RARE
    DAMAGE[f"few right: {name}"] = COLUMN, line

# Warm starts: share of guesses and of wrong steps
STARTS = {"guesses": "0.9 0.03", "works": "0.2 0.03", "errs": "0.55 0.15"}
for start, shares in STARTS.items():
    for file in ("grpo", "minirl"):
        run = f"{file}.py --steps 150 --rollout_dtype float32 {FLAGS.replace('10 ', '25 ', 1)}"
        ARMS[f"start: {start}, {file}"] = f"-m labs.trials.start {shares} {run}"

# Groups that cannot be compared: one response to each prompt, at the same number of responses
SHAPES = {"128 x 1": "--prompts_per_step 128 --group_size 1", "16 x 8": "--group_size 8"}
RATES = {"usual rate": "3e-4", "three times": "1e-3"}
LEARNERS = {"ppo": "-m variants.ppo", "batch mean": "-m variants.baselines --baseline batch"}
LEARNERS["grpo"] = "grpo.py"  # it refuses groups of one
for shape, sizes in SHAPES.items():
    for rate, lr in RATES.items():
        for name, file in LEARNERS.items():
            if (shape, name) != ("128 x 1", "grpo"):
                run = f"{file} --steps 40 {FLAGS} --lr {lr} {sizes}"
                ARMS[f"critic: {shape}, {rate}, {name}"] = run

COLUMNS = ("greedy", "sampled", "entropy", "response_len", "truncated", "reward", "silenced_share")
SEEDS = 3


def share(values: list[float]) -> float | None:
    """The mean in percent; None where there is none."""
    return 100 * float(np.mean(values)) if values else None


def rows(results: dict) -> list[list[str]]:
    numbers = {
        "sampled before": (lambda run: run["sampled"][0], ".2f"),
        "highest": (lab.high("sampled"), ".2f"),
        "at the end": (lab.end, ".2f"),
        "greedy at the end": (lab.last("greedy"), ".2f"),
        "entropy at the end": (lab.late("entropy"), ".2f"),
        "tokens": (lab.late("response_len"), ".0f"),
        "silenced, %": (lambda run: share(run["silenced_share"]), ".3f"),  # stapo.py's alone
    }
    return lab.table(results, numbers)


def draw(results: dict) -> object:
    """A dot is a run."""
    figure, axes = lab.sheet(TITLE, "sampled accuracy at the end", width=8, height=11)
    for y, runs in enumerate(reversed(results.values())):
        ends = [lab.end(run) for run in runs]
        axes[0].scatter(ends, np.full(len(ends), y), s=18, color=lab.BLUE, alpha=0.6)
        axes[0].plot(np.median(ends), y, "|", color=lab.BLACK, markersize=12, markeredgewidth=2)
    axes[0].set_yticks(range(len(results)), labels=reversed(results))
    axes[0].set_xlim(0, 1)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])

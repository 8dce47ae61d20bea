"""Find the bug: a damaged file and the true one train side by side, and you see only the curves.

    python -m labs.bug                      lists the bugs
    python -m labs.bug 3                    two short runs (a minute or two each), one figure
    python -m labs.bug 3 --smoke            the same in seconds, to try the machine: shows nothing
    python -m labs.bug 3 --reveal           the line, and the check that sees it

Most damages come by name from the tests, so the repository stores no damaged file.
"""

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

from common.cli import BadInput, in_one_line
from common.records.files import read_lines
import checks
from tools import arguments, compare
from checks.files import PATHS, ROOT
from checks.loop_mutants import DAMAGES

from labs import lab

LOOP = "tests/loop/test_loop.py"
RUN = "--steps 30 --eval_every 10 --eval_problems 128 --eval_samples 2 --save_every 1000"
SHORT = "--steps 2 --eval_every 2 --eval_problems 8"
OUT = Path("runs/labs/bugs")


@dataclass
class Bug:
    """A damage and what there is to learn from it.

    `named` is a damage's name in checks/FILE.py, or in checks/loop_mutants.py if the loop's test
    sees it; or it is the damage itself, as (a text that the file has once, what it becomes).
    """

    named: str | tuple[str, str]
    seen_by: str  # a check of checks/FILE.py, or the loop's test
    look: str  # a question that does not give the answer away
    why: str  # what the damage does, and what shows it
    file: str = "grpo"
    flags: str = ""

    def damage(self) -> tuple[str, str]:
        """Return a text of the file, and what it becomes."""
        if not isinstance(self.named, str):
            return self.named
        if self.seen_by != LOOP:
            return checks.of(self.file)[1][self.named][:2]
        damage = DAMAGES[self.named]
        return damage.old, damage.new


BUGS = [
    Bug(
        "max for min",
        "check_coefficients",
        "Which tokens are not held back, and which cannot come back?",
        "max takes the other branch of the clip: what moved out too far keeps its gradient, "
        "what moved the wrong way loses it. The clip is inside out.",
        flags="--minibatches 16",
    ),
    Bug(
        "dropped EOS",
        "check_eos_counts",
        "One token of every response is missing from the loss. Which, and what does it decide?",
        "The EOS gets no gradient, so the model does not learn when to stop. This one knows "
        "already, so the curves hardly change; another runs to the length limit (`truncated`). The "
        "usual cause is a mask made of `tokens != pad` where pad and EOS are one id.",
    ),
    Bug(
        "KL direction",
        "check_kl",
        "Which curve would you expect to change, and does it?",
        "exp(x) - x - 1 of x = log π_θ - log π_ref estimates another divergence (its mean under"
        " π_θ is χ² - KL, instead of KL(π_θ ‖ π_ref)). It still pulls to the reference, and "
        "the curves hardly change: only an enumeration shows it.",
        flags="--beta 0.1",
    ),
    Bug(
        "sequence ratio",
        "check_fixture",
        "Look at the gradient norm. Is a ratio of 1.2 much?",
        "The ratio of whole responses is the sum of their log-ratios, without its root: after 25 "
        "tokens it leaves 1 ± 0.2 far sooner, and the whole response is clipped. Every token's "
        "weight lacks its 1/|y|, too: look at the gradient norm. gspo.py takes the mean.",
    ),
    Bug(
        "mean of the batch",
        "check_advantages",
        "Which panel is off by orders of magnitude, and what in a group could do that?",
        "One baseline for all prompts: an easy prompt's samples are all rewarded, a hard one's "
        "all punished, and the advantages of a group no longer add up to 0. Groups without a "
        "difference are divided by a std of 1e-6: look at the gradient norm.",
    ),
    Bug(
        "mean of the part",
        "check_parts_add_up",
        "`--micro_tokens` is to change memory, never the gradient. Is it so?",
        "Each micro-batch is averaged on its own, and then their means are: rows of a small one "
        "count more, here the long responses, of which few fit in. The curves hardly change. One "
        "batch in two divisions shows it: the gradients must be equal.",
        flags="--micro_tokens 512",
    ),
    Bug(
        ("args.max_new_tokens, args.temperature)", "args.max_new_tokens, 0.8)"),
        LOOP,
        "A check was turned off for this run: `--sampler_tolerance 10`. What did it guard?",
        "Sampled at temperature 0.8, trained at 1: the sampler's log-probs are not the "
        "policy's. The ratio hides it, as both sides of it agree; `sampler_kl` does not. With "
        "the tolerance in place the run stops at its first step.",
        flags="--sampler_tolerance 10",
    ),
    Bug(
        "rewards as [G, P]",
        LOOP,
        "Every single number looks sane. What do the samples of a group have in common?",
        "The flat rewards are read as [G, P]: siblings are compared with samples of other "
        "prompts, and the rewards land on other rows. Advantages have mean 0 and std 1, and "
        "nothing to do with the response.",
    ),
    Bug(
        "π_old is π_θ",
        LOOP,
        "Which curve should move, and does not?",
        "π_old is taken anew at every step: the ratio is always 1, nothing is ever clipped, and"
        " four mini-batches are four times plain policy gradient. The rewards do not show it; "
        "`clip_share`, 0 throughout, does.",
    ),
    Bug(
        (
            "return -per_response.sum(), mask.new_tensor(len(mask))",
            "return -(per_response * (logp.detach() - batch.rollout_logp).sum(1).exp()).sum(), "
            "mask.new_tensor(len(mask))",
        ),
        "check_coefficients",
        "Two corrections are better than one?",
        "A weight π_θ/μ on top of PPO's π_θ/π_old: the move away from π_old is counted twice. The "
        "correction for the sampler is π_old/μ there; π_θ/μ belongs to a loss without the ratio "
        "(minirl.py). A spike of the gradient norm is all that shows.",
        flags="--minibatches 16",
    ),
    Bug(
        (
            "logp, micro.entropy = response_logprobs(policy, micro, args.temperature)",
            "logp, _ = response_logprobs(policy, micro, args.temperature); "
            "micro.entropy = -logp.detach() / micro.mask.sum()",
        ),
        LOOP,
        "The runs are the same. Which curve lies?",
        "The logged entropy is -Σ log p of the samples over the number of tokens, twice: it "
        "shrinks as batches grow. The mean of the distribution's entropy is meant.",
    ),
    Bug(
        (
            'stats["ref_kl"] = (k3(args, logp, batch) * batch.mask)',
            'stats["ref_kl"] = ((batch.ref_logp - logp) * batch.mask)',
        ),
        "check_statistics",
        "The runs are the same. Which curve lies?",
        "The metric is the mean of log π_ref - log π_θ, which is -KL: it falls as the policy "
        "leaves the reference.",
    ),
]


def damaged(bug: Bug) -> str:
    """Return the text of the damaged file."""
    return checks.replaced(PATHS[bug.file], *bug.damage())


def finished(folder: Path, steps: int) -> bool:
    """Tell whether `folder` has a run of `steps` steps that is finished and evaluated."""
    if not (folder / "summary.json").exists():
        return False
    last = read_lines(folder / "metrics.jsonl")[-1:]
    return bool(last) and last[0]["step"] == steps and "greedy" in last[0]


def train(path: Path, folder: Path, flags: str) -> None:
    """Run `python path RUN FLAGS` with one thread, unless the folder has that run. The folder
    appears when the run is finished, so an interrupted run leaves nothing behind."""
    words = [*RUN.split(), *flags.split()]
    steps = int([value for name, value in zip(words, words[1:]) if name == "--steps"][-1])
    if finished(folder, steps):
        return
    if folder.exists():
        raise BadInput(f"{folder}: no finished run of {steps} steps; remove it, or give --out")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="under_way_") as scratch:
        run = Path(scratch) / "run"
        words = [sys.executable, str(path), *words, "--run_dir", str(run)]
        ended = subprocess.run(words, env=environment, stdout=subprocess.DEVNULL)
        if ended.returncode:
            raise BadInput(f"{path.name} ended with exit code {ended.returncode}, see above")
        if not finished(run, steps):
            raise BadInput(f"{path.name} was stopped before its end; the same command repeats it")
        run.rename(folder)


def play(number: int, out: Path, more: str = "") -> None:
    """Train both runs and draw their figure; `more` flags make it a smoke test."""
    bug = BUGS[number - 1]
    flags = f"{bug.flags} {more}"
    mark = re.sub(r"\W+", "_", flags).strip("_")
    right = out / f"{bug.file}_{mark}".strip("_")
    wrong = out / f"damaged_{number}_{mark}".strip("_")
    source = out / f"source_{number}" / f"{bug.file}.py"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(damaged(bug), encoding="utf-8")
    train(PATHS[bug.file], right, flags)
    train(source, wrong, flags)
    smoke = ".smoke" * bool(more)
    compare.main([right, wrong], str(out / f"bug_{number}{smoke}"))
    hint = f"{lab.SMOKE}. " * bool(more) + f"Bug {number}. {bug.look} Then --reveal."
    print(textwrap.fill(hint, 100))


def reveal(number: int) -> str:
    """Describe a bug: its line, the reason, the check, and public code that had it."""
    bug = BUGS[number - 1]
    path = PATHS[bug.file]
    before = path.read_text(encoding="utf-8").splitlines()
    changed = damaged(bug).splitlines()
    at = next(i for i, (a, b) in enumerate(zip(before, changed)) if a != b)
    gone = len(before) - len(changed)
    lines = [f"{path.name}:{at + 1}", f"- {before[at].strip()}"]
    lines += [f"+ {changed[at].strip()}"] if not gone else []
    seen = LOOP if bug.seen_by == LOOP else f"{bug.seen_by} of checks/{bug.file}.py"
    lines += [textwrap.fill(bug.why, 100), f"Seen by {seen}. In public code: docs/errors.md."]
    return "\n".join(lines)


def main() -> None:
    """List, play or reveal."""
    parser = arguments(__doc__, "labs.bug")
    parser.add_argument("number", nargs="?", type=int, metavar="N")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--reveal", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    words = parser.parse_args()
    try:
        if words.number is None:
            for number, bug in enumerate(BUGS, 1):
                print(f"{number:2}  {bug.file}.py {bug.flags}".rstrip() + f": {bug.look}")
        elif not 1 <= words.number <= len(BUGS):
            raise BadInput(f"{words.number}: there are bugs 1 to {len(BUGS)}")
        elif words.reveal:
            print(reveal(words.number))
        else:
            play(words.number, words.out, SHORT if words.smoke else "")
    except (BadInput, OSError) as error:
        parser.error(in_one_line(error))
    except KeyboardInterrupt:
        parser.exit(130, "labs.bug: interrupted; a run that ended is not run again\n")


if __name__ == "__main__":
    main()

"""When does clipping fail? Answers to stale batches.

    python -m tools.staleness LR LAG [SEED [WAY]] [--keep FOLDER] [--updates N]

Same staleness (each batch is trained on LAG updates after it was sampled), batches, learning rate,
warm-up and number of updates:
    none       grpo.py's loss with π_old evaluated by the trainer, as if the batch were fresh
    clip       grpo.py's loss with the sampler's log-probs for π_old: PPO's clip against μ
    truncated  vcpo.py with both controls off: one weight per response, cut at 8
    vcpo       vcpo.py
    ess        vcpo.py with its step length and the group mean for a baseline
    baseline   vcpo.py with its baseline and steps of full length
Prints the rows of docs/results.md: greedy accuracy after every 25th update, sampled at the end.
Without WAY the first four; --updates: how many (default: 150). --keep leaves the run folders in
FOLDER (in vcpo.py's, LAG steps pass before the first update).

none and clip differ from the other four in the loss (grpo.py's without KL), truncated from vcpo in
the controls alone.
"""

import json
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path

import grpo
import vcpo
from common.plumbing.launch import launch
from tools import arguments

EVERY, PROMPTS = 25, 8
OFF = {"ess": "--no_optimal_baseline", "baseline": "--no_ess_scaling"}  # what each half leaves out
OFF |= {"truncated": " ".join(OFF.values()), "vcpo": ""}
WAYS = ("none", "clip", "truncated", "vcpo", "ess", "baseline")


def run(way: str, lr: float, lag: int, seed: int, keep: Path, updates: int) -> None:
    """One training run, and its row."""
    folder = keep / f"{way}-lr{lr:g}-lag{lag}-s{seed}"
    words = f"--lr {lr} --seed {seed} --prompts_per_step {PROMPTS} --minibatches 1 --warmup 5"
    words += f" --run_dir {folder}"
    if way in OFF:
        words += f" --lag {lag} --steps {updates + lag} --eval_every 1 {OFF[way]}"
        evaluate_between_updates(lag)
    else:
        words += f" --steps {updates} --eval_every {EVERY} --beta 0"
        delay(lag, against_sampler=way == "clip")
    module = vcpo if way in OFF else grpo
    sys.argv = [f"{module.__name__}.py", *words.split()]
    launch(module.main, module.Args)
    lines = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    greedy = [f"{line['greedy']:.2f}" for line in lines if "greedy" in line]
    sampled = [line["sampled"] for line in lines if "sampled" in line]
    cells = [f"{lr:g}", str(lag), way, str(seed), " · ".join(greedy), f"{sampled[-1]:.2f}"]
    print(f"| {' | '.join(cells)} |", flush=True)


def evaluate_between_updates(lag: int) -> None:
    """Make vcpo.py evaluate after updates 0, 25, ...: its steps are `lag` ahead of its updates."""
    evaluate, step = vcpo.evaluate, -1

    def at_the_same_updates(*arguments: object) -> dict:
        nonlocal step
        step += 1
        update = step - lag
        return evaluate(*arguments) if step == 0 or update > 0 and update % EVERY == 0 else {}

    vcpo.evaluate = at_the_same_updates


def delay(lag: int, against_sampler: bool) -> None:
    """Make grpo.py train on stale batches: what its engine returns was sampled `lag` updates ago.

    As in vcpo.py the first lag + 1 batches come from the first weights. The batch brings its own
    answers along.
    """
    make_engine, load_task, recompute = grpo.make_engine, grpo.load_task, grpo.all_logprobs
    stream: dict = {"step": 0, "waiting": deque(), "train": None, "answers": None}

    def engine_of(*arguments: object) -> object:
        engine = make_engine(*arguments)
        generate = engine.generate

        def stale(prompts: list, n: int, limit: int, temperature: float) -> object:
            if len(prompts) != PROMPTS:  # an evaluation
                return generate(prompts, n, limit, temperature)
            while len(stream["waiting"]) <= lag:
                problems = [stream["train"](stream["step"] * PROMPTS + i) for i in range(PROMPTS)]
                rollout = generate([p.prompt_ids for p in problems], n, limit, temperature)
                stream["waiting"].append((rollout, [p.answer for p in problems for _ in range(n)]))
                stream["step"] += 1
            rollout, stream["answers"] = stream["waiting"].popleft()
            return rollout

        engine.generate = stale
        return engine

    def task_of(*arguments: object) -> object:
        task = load_task(*arguments)
        verifier, stream["train"] = task.verifier, task.train

        def of_the_stale_batch(texts: list[str], answers: list[str]) -> list[float]:
            return verifier(texts, stream["answers"] if len(answers) == PROMPTS * 8 else answers)

        task.verifier = of_the_stale_batch
        return task

    def old(policy: object, batch: object, *more: object) -> tuple:
        return (batch.rollout_logp, None) if against_sampler else recompute(policy, batch, *more)

    grpo.make_engine, grpo.load_task, grpo.all_logprobs = engine_of, task_of, old
    # It would stop the run: that is the point.
    grpo.Run.check_sampler = lambda run, sampler: sampler


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("lr", type=float, metavar="LR")
    parser.add_argument("lag", type=int, metavar="LAG")
    parser.add_argument("seed", type=int, nargs="?", default=1, metavar="SEED")
    parser.add_argument("way", choices=WAYS, nargs="?", metavar="WAY")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--updates", type=int, default=150, metavar="N")
    chosen = parser.parse_args()
    if not 0 < chosen.lr < 1e9:  # not NaN
        parser.error(f"LR {chosen.lr}: must be a number above 0")
    if chosen.lag < 0:
        parser.error(f"LAG {chosen.lag}: must be 0 or more")
    if chosen.updates < 1:
        parser.error(f"--updates {chosen.updates}: must be 1 or more")
    with tempfile.TemporaryDirectory() as folder:
        keep = str(chosen.keep or folder)
        if chosen.way:
            run(chosen.way, chosen.lr, chosen.lag, chosen.seed, Path(keep), chosen.updates)
        more = ("--updates", chosen.updates)
        for way in () if chosen.way else WAYS[:4]:
            words = map(str, (chosen.lr, chosen.lag, chosen.seed, way, "--keep", keep, *more))
            if code := subprocess.run([sys.executable, "-m", "tools.staleness", *words]).returncode:
                sys.exit(code)  # it has said why

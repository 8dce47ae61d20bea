"""When does clipping fail? `python docs/staleness.py LR LAG [SEED]` compares four answers to stale batches.

Same staleness (each batch is trained on LAG updates after it was sampled), batch size and learning rate:
    none       grpo.py's loss with π_old evaluated by the trainer, as if the batch were fresh
    clip       grpo.py's loss with the sampler's log-probs for π_old: PPO's clip against μ
    truncated  vcpo.py with both controls off: sequence weights cut at 8
    vcpo       vcpo.py
Prints the README's rows: greedy accuracy at every 25th step, sampled accuracy at the end.
"""

import json
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import common  # noqa: F401  (before torch)
import grpo
import vcpo
from common.tracking import launch

STEPS, PROMPTS = 150, 8


def run(name: str, lr: str, lag: int, seed: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = f"--lr {lr} --seed {seed} --steps {STEPS} --prompts_per_step {PROMPTS} --minibatches 1"
        words += f" --run_dir {folder}/run"
        module = vcpo if name in ("truncated", "vcpo") else grpo
        if module is vcpo:
            words += f" --lag {lag}" + (" --no_ess_scaling --no_optimal_baseline" if name == "truncated" else "")
        else:
            words += " --beta 0"
            delay(lag, against_sampler=name == "clip")
        sys.argv = [f"{module.__name__}.py", *words.split()]
        launch(module.main, module.Args)
        lines = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
    greedy = [f"{line['greedy']:.2f}" for line in lines if "greedy" in line]
    sampled = [line["sampled"] for line in lines if "sampled" in line]
    print(f"| {lr} | {lag} | {name} | {' · '.join(greedy)} | {sampled[-1]:.2f} |", flush=True)


def delay(lag: int, against_sampler: bool) -> None:
    """Make grpo.py train on stale batches: what its engine returns was sampled `lag` updates ago.

    As in vcpo.py the first lag + 1 batches come from the first weights. The batch brings its own answers along.
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
        judge, stream["train"] = task.judge, task.train
        task.judge = lambda texts, answers: judge(texts, stream["answers"] if len(answers) == PROMPTS * 8 else answers)
        return task

    def old(policy: object, batch: object, args: object, world: object) -> tuple:
        return (batch.rollout_logp, None) if against_sampler else recompute(policy, batch, args, world)

    grpo.make_engine, grpo.load_task, grpo.all_logprobs = engine_of, task_of, old
    grpo.check_sampler = lambda *arguments: {}  # it would stop the run: that is the point


if __name__ == "__main__":
    rate, lag, seed, *only = (*sys.argv[1:], "1")[:3] if len(sys.argv) < 5 else sys.argv[1:]
    if only:
        run(only[0], rate, int(lag), seed)
    for variant in () if only else ("none", "clip", "truncated", "vcpo"):
        subprocess.run([sys.executable, __file__, rate, lag, seed, variant], check=True)

"""One rollout-and-update step of grpo.py and of TRL's GRPOTrainer, in turn.

    python -m tools.maintain.bench MODEL [--full]

MODEL is tiny or a folder. Both sides use the same model, prompts, group size, length limit (`--size
P G T`), reward, KL term, precision and optimiser steps per rollout (`--minibatches`). With `--full`
EOS ends no response, so all responses have the same length. Each side runs in its own process, in
turn, `--rounds` times. The program prints medians, ratios and peak memory. TRL is not a dependency
of the project: `pip install trl accelerate`.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from checks.files import ROOT
from tools import arguments

STEPS = 10  # measured, after two to warm up


def reward(text: str) -> float:
    """A coin flip that depends on the text alone, so that groups have something to compare."""
    return float(hashlib.md5(text.encode()).digest()[0] % 2)


def prompts_of(model: str, count: int) -> list[str]:
    """Prompts that the model's tokenizer can read."""
    if model == "tiny":
        return [f"{i % 10}*{i % 7}-{i % 9}+{i % 8}=" for i in range(count)]
    return [f"Question: what is {i} plus {i * i}?\nAnswer:" for i in range(count)]


def peak_memory() -> float:
    """GB: of the GPU if there is one, otherwise of this process."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def ours(given: argparse.Namespace) -> dict[str, float]:
    """Medians over the steps of grpo.py's own main."""
    import grpo
    import torch
    from common.data import Problem, Task
    from common.launch import launch
    from common.rollout import make_engine
    from common.run import read_lines

    P, G, T = given.size

    def task_of(args: object, tokenizer: object) -> Task:
        problems = [
            Problem(text, "", tokenizer(text)["input_ids"]) for text in prompts_of(given.model, P)
        ]

        def verifier(texts: list[str], answers: list[str]) -> list[float]:
            return [reward(text) for text in texts]

        rest = {"final": list, "tokenizer": tokenizer}
        return Task("bench", lambda i: problems[i % P], [], verifier, **rest)

    def endless(args: object, lm: object, world: object) -> object:
        engine = make_engine(args, lm, world)
        if given.full:
            engine.eos = torch.tensor([-1], device=world.device)
        return engine

    grpo.load_task, grpo.make_engine = task_of, endless
    grpo.evaluate = lambda *a: {"greedy": 0.0, "sampled": 0.0}
    grpo.save_checkpoint = lambda *a: None
    with tempfile.TemporaryDirectory() as scratch:
        words = f"--prompts_per_step {P} --group_size {G} --max_new_tokens {T} --rollout hf"
        words += f" --minibatches {given.minibatches} --steps {STEPS + 2} --beta 0.04 --lr 1e-6"
        words += " --eval_every 10000 --save_every 10000 --sample_every 0"
        sys.argv = ["grpo.py", "--model", given.model, *words.split(), f"--run_dir={scratch}/run"]
        launch(grpo.main, grpo.Args)
        lines = read_lines(Path(scratch) / "run" / "metrics.jsonl")[3:]

    def median(*names: str) -> float:
        return statistics.median(sum(line[name] for name in names) for line in lines)

    found = {"tokens": median("tokens"), "step": median("seconds")}
    found |= {"rollout": median("seconds_rollout"), "memory": peak_memory()}
    return found | {"update": median("seconds_logprobs", "seconds_update")}


def trl(given: argparse.Namespace) -> dict[str, float]:
    """The same measurements of TRL's GRPOTrainer at the same settings."""
    import torch
    from common.model import EMBEDDED
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    P, G, T = given.size
    folder = str(EMBEDDED.get(given.model, given.model))
    moments, spent = [], {"_generate": [], "_calculate_rewards": []}
    cuda = torch.cuda.is_available()

    class Clock(TrainerCallback):
        def on_step_end(self, *arguments: object, **keywords: object) -> None:
            if cuda:
                torch.cuda.synchronize()
            moments.append(time.perf_counter())

    def timed(name: str) -> Callable:
        """The trainer's method, and its seconds in `spent`."""
        method = getattr(GRPOTrainer, name)

        def run(self: object, *arguments: object, **keywords: object) -> object:
            start = time.perf_counter()
            result = method(self, *arguments, **keywords)
            if cuda:
                torch.cuda.synchronize()
            spent[name].append(time.perf_counter() - start)
            return result

        return run

    def reward_of(completions: list[str], **keywords: object) -> list[float]:
        return [reward(text) for text in completions]

    Timed = type("Timed", (GRPOTrainer,), {name: timed(name) for name in spent})
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            per_device_train_batch_size=P * G // given.minibatches,
            steps_per_generation=given.minibatches,
            num_generations=G,
            max_completion_length=T,
            generation_kwargs={"min_new_tokens": T} if given.full else None,
            beta=0.04,
            loss_type="grpo",
            learning_rate=1e-6,
            temperature=1.0,
            max_steps=(STEPS + 2) * given.minibatches,
            gradient_checkpointing=False,
            bf16=cuda,
            use_cpu=not cuda,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32", "trust_remote_code": False},
        )
        prompts = prompts_of(given.model, P) * (STEPS + 4)
        trainer = Timed(
            model=folder,
            reward_funcs=reward_of,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": text} for text in prompts]),
            processing_class=AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
        )
        trainer.add_callback(Clock())
        trainer.train()
    # When a rollout's last optimiser step was done
    moments = moments[given.minibatches - 1 :: given.minibatches]
    step = statistics.median(b - a for a, b in zip(moments[1:], moments[2:]))
    rollout, reward_part = (statistics.median(times[2:]) for times in spent.values())
    logged = [line for line in trainer.state.log_history if "reward" in line]
    length = statistics.median(line["completions/mean_length"] for line in logged[2:])
    found = {"tokens": length * P * G, "step": step, "rollout": rollout, "memory": peak_memory()}
    return found | {"update": step - rollout - reward_part}


def measure(side: str) -> dict[str, float]:
    """The measurements of one side, made by this program in a process of its own."""
    words = [sys.executable, "-m", "tools.maintain.bench", *sys.argv[1:], "--side", side]
    env = {"HF_HUB_OFFLINE": "1"} | os.environ
    done = subprocess.run(words, cwd=ROOT, capture_output=True, encoding="utf-8", env=env)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(f"{side} failed:\n{done.stderr[-2000:]}")
    return json.loads(lines[0].removeprefix("RESULT "))


def table(found: dict[str, list[dict]]) -> str:
    """Medians, smallest and largest of the rounds, and the sides' ratio, as a Markdown table."""
    lines = ["| | grpo.py | TRL | ratio |", "|---|---|---|---|"]
    rows = {"tokens per step": "tokens", "seconds per step": "step", "peak memory, GB": "memory"}
    rows |= {"rollout, tokens/s": "rollout", "log-probs and update, tokens/s": "update"}
    for label, name in rows.items():
        cells, medians = [], []
        for rounds in found.values():
            values = [one[name] for one in rounds]
            if "tokens/s" in label:
                values = [one["tokens"] / one[name] for one in rounds]
            medians.append(statistics.median(values))
            cells.append(f"{medians[-1]:.4g} ({min(values):.4g} to {max(values):.4g})")
        lines.append(f"| {label} | {' | '.join(cells)} | {medians[0] / medians[1]:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """One side in this process, or (without --side) both alternating, and the table."""
    parser = arguments(__doc__)
    add, words = parser.add_argument, ("P", "G", "T")
    add("model", nargs="?", default="tiny", help="tiny or a model folder")
    add("--full", action="store_true", help="make every response as long as the limit")
    add("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    add("--rounds", type=int, default=3)
    add("--size", type=int, nargs=3, default=(16, 8, 64), metavar=words, help="default: 16 8 64")
    add("--minibatches", type=int, default=4, help="optimiser steps per rollout (default: 4)")
    given = parser.parse_args()
    if given.side:
        print("RESULT", json.dumps(ours(given) if given.side == "ours" else trl(given)))
        return
    if not importlib.util.find_spec("trl"):
        parser.error("TRL is missing: pip install trl accelerate")
    found: dict[str, list[dict]] = {"ours": [], "trl": []}
    for _ in range(given.rounds):
        for side, rounds in found.items():
            rounds.append(measure(side))
    print(table(found))


if __name__ == "__main__":
    main()

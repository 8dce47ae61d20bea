"""One rollout-and-update step of grpo.py and of TRL's GRPOTrainer, in turn.

    python -m tools.maintain.bench MODEL [--full]

MODEL is tiny, a folder, or qwen3-1.7b (its shape, random weights). Both sides use the same model,
prompts, group size, length limit (`--size P G T`), reward, KL term, precision and optimiser steps
per rollout (`--minibatches`: for tiny grpo.py's four, otherwise the paper's one). With `--full` EOS
ends no response, so all responses have the same length. Each side runs in its own process, three
times, alternating. The program prints medians, ratios and peak memory. TRL is not a dependency of
the project: `pip install trl accelerate`.
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

from tools import arguments
from checks.files import ROOT

PHASES = ("rollout", "reward", "logprobs", "update", "sync")  # TRL samples with the policy itself
SCORE = "_generate_and_score_completions"  # TRL's rollout, rewards and old log-probs
# model: prompts, responses to each, tokens of each, steps measured after two to warm up
SIZES = {"tiny": (16, 8, 64, 12), "other": (2, 4, 32, 3), "qwen3-1.7b": (8, 8, 512, 4)}


def reward(text: str) -> float:
    """A coin flip that depends on the text alone, so that groups have something to compare."""
    return float(hashlib.md5(text.encode()).digest()[0] % 2)


def prompts_of(model: str, count: int) -> list[str]:
    """Prompts that the model's tokenizer can read."""
    if model == "tiny":
        return [f"{i % 10}*{i % 7}-{i % 9}+{i % 8}=" for i in range(count)]
    return [f"Question: what is {i} plus {i * i}?\nAnswer:" for i in range(count)]


def folder_of(model: str, scratch: str) -> str:
    """The model's folder: the embedded one, the one given, or random weights of Qwen3-1.7B, which
    are written to the empty folder `scratch`."""
    from common.model import EMBEDDED

    if model != "qwen3-1.7b":
        return str(EMBEDDED.get(model, model))
    import torch

    from tools.maintain.shapes import byte_tokenizer, qwen3_1_7b

    torch.manual_seed(0)
    qwen3_1_7b().save_pretrained(scratch)
    byte_tokenizer(151_936).save_pretrained(scratch)
    return scratch


def peak_memory() -> float:
    """GB: of the GPU if there is one, otherwise of this process."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def ours(model: str, folder: str, full: bool, size: list[int], minibatches: int) -> dict:
    """Medians over the steps of grpo.py's own main."""
    import grpo
    import torch
    from common.data import Problem, Task
    from common.distributed import setup
    from common.launch import check
    from common.model import load_model
    from common.rollout import make_engine

    P, G, T, steps = size
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        flags = {"prompts_per_step": P, "group_size": G, "max_new_tokens": T}
        flags |= {"minibatches": minibatches, "steps": steps + 2, "rollout": "hf"}
        flags |= {"eval_every": 10_000, "save_every": 10_000, "beta": 0.04, "lr": 1e-6}
        args = grpo.Args(model=folder, run_dir=str(run_dir), **flags)
        _, tokenizer = load_model(folder)
        problems = [
            Problem(text, "", tokenizer(text)["input_ids"]) for text in prompts_of(model, P)
        ]

        def endless(args: object, lm: object, world: object) -> object:
            engine = make_engine(args, lm, world)
            if full:
                engine.eos = torch.tensor([-1], device=world.device)
            return engine

        def verifier(texts: list[str], answers: list[str]) -> list[float]:
            return [reward(text) for text in texts]

        task = Task("bench", lambda i: problems[i % P], [], verifier, tokenizer=tokenizer)
        grpo.load_task, grpo.make_engine = lambda *a: task, endless
        grpo.evaluate = lambda *a: {"greedy": 0.0, "sampled": 0.0}
        grpo.save_checkpoint = lambda *a: None
        world = setup()
        check(args, world)
        grpo.main(args, world)
        lines = (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
        lines = [json.loads(line) for line in lines[3:]]  # after the start and two to warm up
    names = {"tokens": "tokens", "step": "seconds"} | {x: f"seconds_{x}" for x in PHASES}
    found = {name: statistics.median(line[key] for line in lines) for name, key in names.items()}
    return found | {"memory": peak_memory()}


def trl(model: str, folder: str, full: bool, size: list[int], minibatches: int) -> dict:
    """The same measurements of TRL's GRPOTrainer at the same settings."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    P, G, T, steps = size
    moments, spent = [], {"_generate": [], "_calculate_rewards": [], SCORE: []}
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
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

    Timed = type("Timed", (GRPOTrainer,), {name: timed(name) for name in spent})

    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            per_device_train_batch_size=P * G // minibatches,
            steps_per_generation=minibatches,
            num_generations=G,
            max_completion_length=T,
            generation_kwargs={"min_new_tokens": T} if full else None,
            beta=0.04,
            loss_type="grpo",
            learning_rate=1e-6,
            temperature=1.0,
            max_steps=(steps + 2) * minibatches,
            gradient_checkpointing=False,
            bf16=cuda,
            use_cpu=not cuda,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32", "trust_remote_code": False},
        )
        rows = Dataset.from_list([{"prompt": text} for text in prompts_of(model, P) * (steps + 4)])

        def reward_of(completions: list[str], **keywords: object) -> list[float]:
            return [reward(text) for text in completions]

        trainer = Timed(
            model=folder,
            reward_funcs=reward_of,
            args=config,
            train_dataset=rows,
            processing_class=tokenizer,
        )
        trainer.add_callback(Clock())
        trainer.train()
    # When a rollout's last optimiser step was done
    moments = moments[minibatches - 1 :: minibatches]
    step = statistics.median(b - a for a, b in zip(moments[1:], moments[2:]))
    rollout, reward_part, score = (statistics.median(times[2:]) for times in spent.values())
    found = {"step": step, "rollout": rollout, "reward": reward_part, "update": step - score}
    found |= {"logprobs": score - rollout - reward_part}
    logged = [line for line in trainer.state.log_history if "reward" in line]
    length = statistics.median(line["completions/mean_length"] for line in logged[2:])
    return found | {"memory": peak_memory(), "tokens": length * P * G}


def measure(side: str, args: argparse.Namespace, size: list[int], folder: str) -> dict:
    """The measurements of one side, made in a process of its own."""
    env = {"HF_HUB_OFFLINE": "1"} | os.environ
    words = [sys.executable, "-m", "tools.maintain.bench", args.model, "--side", side]
    words += ["--size", *map(str, size[:3]), "--minibatches", str(args.minibatches)]
    words += ["--folder", folder, *["--full"] * args.full]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, encoding="utf-8", env=env)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode == 2:  # wrong input, its last line says which
        print(done.stderr.splitlines()[-1], file=sys.stderr)
        sys.exit(2)
    if not lines:
        sys.exit(f"{side} failed:\n{done.stderr[-2000:]}")
    return json.loads(lines[0].removeprefix("RESULT "))


def table(found: dict[str, list[dict]]) -> str:
    """Medians, smallest and largest of the rounds, and the sides' ratio, as a Markdown table."""
    rows = {"tokens per step": "tokens", "seconds per step": "step", "rollout, tokens/s": "rollout"}
    rows |= {"log-probs and update, tokens/s": "both", "peak memory, GB": "memory"}
    rows |= {f"{phase}, ms": phase for phase in PHASES}
    lines = ["| | grpo.py | TRL | ratio |", "|---|---|---|---|"]
    for rounds in found.values():
        for one in rounds:
            one["both"] = one["logprobs"] + one["update"]
    for label, name in rows.items():
        cells, medians = [], []
        for rounds in found.values():
            known = [one for one in rounds if name in one]
            if not known:  # TRL has no sync
                cells.append("-")
                continue
            if "tokens/s" in label:
                values = [one["tokens"] / one[name] for one in known]
            elif label.endswith("ms"):
                values = [1e3 * one[name] for one in known]
            else:
                values = [one[name] for one in known]
            medians.append(statistics.median(values))
            cells.append(f"{medians[-1]:.4g} ({min(values):.4g} to {max(values):.4g})")
        ratio = f"{medians[0] / medians[1]:.2f}" if len(medians) == 2 else "-"
        lines.append(f"| {label} | {' | '.join(cells)} | {ratio} |")
    shares = [sum(r[phase] for phase in PHASES) / r["step"] for r in found["ours"]]
    lines.append(f"grpo.py: {1 - statistics.median(shares):.1%} of the step outside these phases")
    return "\n".join(lines)


SIDES = {"ours": ours, "trl": trl}


def main() -> None:
    """One side in this process, or (without --side) both alternating, and the table."""
    parser = arguments(__doc__)
    add, words = parser.add_argument, ("P", "G", "T")
    add("model", nargs="?", default="tiny", help="tiny, a model folder, or qwen3-1.7b")
    add("--full", action="store_true", help="make every response as long as the limit")
    add("--side", choices=[*SIDES], help=argparse.SUPPRESS)
    add("--folder", default="", help=argparse.SUPPRESS)
    add("--rounds", type=int, default=3)
    add("--size", type=int, nargs=3, metavar=words, help="prompts, responses, tokens of each")
    add("--minibatches", type=int, help="optimiser steps per rollout (tiny: 4, else 1)")
    args = parser.parse_args()
    args.minibatches = args.minibatches or (4 if args.model == "tiny" else 1)
    size = SIZES.get(args.model, SIZES["other"])
    size = [*(args.size or size[:3]), size[3]]
    if args.side:
        from common.cli import BadInput

        side, folder = SIDES[args.side], args.folder or args.model
        try:
            found = side(args.model, folder, args.full, size, args.minibatches)
        except BadInput as error:
            parser.error(str(error))
        print("RESULT", json.dumps(found))
        return
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be 1 or more")
    if not importlib.util.find_spec("trl"):
        parser.error("TRL is missing: pip install trl accelerate")
    P, G, T, _ = size
    length = f"{T} tokens" if args.full else f"at most {T} tokens"
    print(f"{args.model}: {P} prompts x {G} responses, {length}")
    print(f"{args.minibatches} optimiser step(s) per rollout")
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = folder_of(args.model, scratch)
        print(f"medians of {args.rounds} rounds (smallest to largest)", flush=True)
        found: dict[str, list[dict]] = {"ours": [], "trl": []}
        for _ in range(args.rounds):
            for side, rounds in found.items():
                rounds.append(measure(side, args, size, folder))
    print(table(found))


if __name__ == "__main__":
    main()

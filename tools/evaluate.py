"""Measure the accuracy of a model or of a run's checkpoint: avg@n, pass@k, 95% intervals.

    python -m tools.evaluate runs/grpo-arithmetic-s1
    python -m tools.evaluate tiny --eval_problems 1000 --eval_samples 16
    torchrun --nproc_per_node=8 -m tools.evaluate Qwen/Qwen3-1.7B-Base --max_new_tokens 4096 \\
        --eval_task aime24,aime25,math500 --eval_samples 32

MODEL is a hub name, a folder in the Hugging Face format, `tiny`, `tiny-moe`, or a run folder of any
algorithm and number of ranks. For a run folder, flags that you leave out have the run's values, and
a run under way is not disturbed. A checkpoint is read with pickle, and config.json may name a task
file. Both can run code, so evaluate only your own run folders. Each set is measured greedily, and
at T 1.0 / top-p 1.0 and T 0.7 / top-p 0.9, the two settings that papers report. When a set is done
at a setting, its line of the table is printed, and its responses and scores go to a new file.
"""

import argparse
import math
import re
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from common import cli
from common.cli import BadInput, Count, CountOrZero, Flags, blame, broken_rule
from common.data import Problem, Task, as_problem, load_task, texts_of
from common.distributed import World, from_all, shard
from common.launch import launch, resolve_auto
from common.logprobs import Policy
from common.model import load_model
from common.records.checkpoint import checkpoints, first_failure, step_of
from common.records.files import as_lines, saved_config
from common.rollout import make_engine
from common.tasks.reward import Verifier
from common.tasks.rows import rows_of
from common.tasks.sources import Verify
from common.tiny import arithmetic
import torch
import torch.distributed.checkpoint as dcp
import tyro
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from variants import tool

SETTINGS = ((0.0, 1.0), (1.0, 1.0), (0.7, 0.9))  # (temperature, top-p); 0 is greedy, one response
RESAMPLES = 2000
OF_THE_RUN = "task eval_problems eval_samples max_new_tokens max_prompt_tokens instruction "
OF_THE_RUN += "prompt_column answer_column chat rollout_dtype"  # flags whose default is the run's


@dataclass
class Args(Flags):
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = "tiny"
    """Hub name, local folder, `tiny`, `tiny-moe`, or run folder."""
    task: str = "arithmetic"
    """Task whose held-out problems are measured without --eval_task (for a run: its own task)."""
    eval_task: str = ""
    """Whole sets to measure, comma-separated: hub sets, .jsonl or .parquet files, arithmetic, or
    a task file FILE.py."""
    eval_samples: Count = 4
    """n: responses per problem at each of the two settings that sample (our choice)."""
    rollout_rows: Count = 1024
    """Responses sampled at once; lower it if the KV cache does not fit (our choice)."""
    max_new_tokens: Count = 64
    """Length limit of a response (our choice)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the model, float32 or bfloat16 (auto: bfloat16 on GPUs)."""
    step: CountOrZero = 0
    """Step of a run's checkpoint (0: the newest)."""
    run_dir: str = ""
    """Folder for the responses (default: the run's, else runs/evaluations)."""


class Set(NamedTuple):
    """A set of problems with a name and a verifier."""

    name: str
    problems: list[Problem]
    verifier: Verify
    task: Task | None = None  # the task, if these are its held-out problems


def prepare(args: Args, world: World) -> None:
    """Check all flags. If MODEL is a run, first take its values for flags that were left out."""
    config = saved_config(Path(args.model))
    if config:
        own = {name: config[name] for name in OF_THE_RUN.split()}
        own["chat"] = tuple(own["chat"])  # JSON has only lists
        # Parse the command line once more, with the run's values as defaults.
        again = tyro.cli(Args, default=replace(Args(), **own), use_underscores=True)
        vars(args).update(vars(again))
    if wrong := broken_rule(args):
        raise BadInput(wrong)
    resolve_auto(args, world, config.get("model", args.model))


def load_sets(
    args: Args, config: dict, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Set], list[str]]:
    """Load the sets to measure; return them and remarks for the user.

    `config` is the run's, or empty. A run's held-out problems are those that it measured itself.
    """
    if not args.eval_task:
        own = args.task == config.get("task")
        spec = config.get("eval_task", "") if own else ""
        task = load_task(replace(args, eval_task=spec), tokenizer)
        changed = own and config.get("data", "") != task.fingerprint
        warning = f"{args.task} changed since the run: it may have trained on these problems"
        return [Set(task.name, task.held_out, task.verifier, task)], [warning] if changed else []
    sets, math_verify = [], Verifier()
    for spec in dict.fromkeys(args.eval_task.split(",")):
        if spec in arithmetic.KINDS or ".py" in spec:
            task = load_task(replace(args, task=spec, eval_task=""), tokenizer)
            sets.append(Set(spec, task.held_out, task.verifier))
            continue
        columns = (args.prompt_column, args.answer_column)
        how = {"instruction": args.instruction, "args": args, "tokenizer": tokenizer}
        rows = rows_of(spec, "test", *columns, fits=partial(as_problem, **how))
        sets.append(Set(spec, [as_problem(row, "", **how) for row in rows], math_verify))
    return sets, []


def engine_of(
    args: Args, config: dict, lm: PreTrainedModel, task: Task | None, world: World
) -> object:
    """Make the sampling engine; for a run of variants/tool.py, with its tool."""
    if config.get("algorithm") != "tool":
        return make_engine(args, lm, world)
    if args.eval_task:
        raise BadInput(f"--eval_task {args.eval_task}: the run's tool is its own task's alone")
    own = {name: config[name] for name in ("turn_end", "max_turns", "failed_call")}
    return tool.Turns(argparse.Namespace(**vars(args) | own), lm, task, world)


def load_weights(folder: Path, policy: nn.Module, world: World, wanted: int = 0) -> int:
    """Load the weights of a run's checkpoint (0: the newest) into the policy; return its step.

    Any algorithm may have written it, on any number of ranks.
    """
    steps = {step_of(path): path for path in checkpoints(folder)}
    step = wanted or max(steps, default=0)
    if step not in steps:
        raise BadInput(f"MODEL {folder}: no checkpoint of step {step}, has {sorted(steps)}")
    checkpoint = steps[step]
    weights, shards = get_model_state_dict(policy), dcp.FileSystemReader(checkpoint / "shards")
    what = f"MODEL {folder}: {checkpoint} is damaged or does not fit its model"
    with blame(what), first_failure():
        # If several models were saved together, the policy is the first one.
        alone = f"policy.{next(iter(weights))}" in shards.read_metadata().state_dict_metadata
        named = weights if alone else {f"0.{name}": value for name, value in weights.items()}
        dcp.load({"policy": named}, storage_reader=shards)  # in place
    return step


def main(args: Args, world: World) -> None:
    """Measure every set at every setting."""
    run, config = Path(args.model), saved_config(Path(args.model))
    name = run.resolve().name if config else re.sub(r"[^\w.-]+", "-", args.model).strip("-")
    folder = Path(args.run_dir or (run if config else "runs/evaluations")).expanduser()
    args.model = config.get("model", args.model)

    def say(*lines: str) -> None:
        """Print on rank 0, above the progress bar."""
        with tqdm.external_write_mode():
            if lines and world.rank == 0:
                cli.say(*lines)

    lm, tokenizer = load_model(args.model, world, "MODEL")
    sets, remarks = load_sets(args, config, tokenizer)
    engine, step = engine_of(args, config, lm, sets[0].task, world), 0
    if config:
        policy = shard(Policy(lm), args, world)
        step = load_weights(run, policy, world, args.step)
        engine.sync(policy)
        del policy
    del lm
    what = f"{name} after step {step}" if config else args.model
    words = ["evaluation", name, *[f"step{step}"] * bool(config)]
    words += [re.sub(r"[^\w.-]+", "-", Path(dataset.name).stem) for dataset in sets]
    file = folder / f"{'-'.join(words)[:150]}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    if world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    total, hidden = len(SETTINGS) * sum(len(dataset.problems) for dataset in sets), world.rank > 0
    say(f"{what}; {world.size} rank(s) on {world.device}, {args.dtype}", *remarks)
    say(*head(args.eval_samples))
    bar = tqdm(total=total, disable=hidden, dynamic_ncols=True, unit="problem")
    world.closing.callback(bar.close)
    failed = 0
    for dataset in sets:
        for temperature, top_p in SETTINGS:
            rows = measure(engine, dataset, temperature, top_p, tokenizer, args, world, bar)
            say(line_of(rows, args.eval_samples))
            failed += sum(sum(row["failed"]) for row in rows)
            if world.rank == 0:
                with file.open("a", encoding="utf-8") as lines:
                    lines.write(as_lines(rows))
    if failed:
        say(f"{failed} answers could not be scored, or broke the verifier's bounds: 0 points")
    bar.close()
    say(f"responses and scores: {file}")


def measure(
    engine: object,
    dataset: Set,
    temperature: float,
    top_p: float,
    tokenizer: PreTrainedTokenizerBase,
    args: Args,
    world: World,
    bar: tqdm,
) -> list[dict]:
    """Measure a set at one setting; return a row for each problem, with responses and scores.

    All ranks return the same rows. In each turn a rank gets problems for --rollout_rows responses.
    Every rank takes part in every turn, because ranks may share a vLLM engine.
    """
    n, rows = args.eval_samples if temperature else 1, []
    how = {"set": dataset.name, "temperature": temperature, "top_p": top_p}
    turn = max(1, args.rollout_rows // n) * world.size
    for start in range(0, len(dataset.problems), turn):
        numbers = range(start, min(start + turn, len(dataset.problems)))
        mine = [(number, dataset.problems[number]) for number in numbers[world.rank :: world.size]]
        prompts = [p.prompt_ids for _, p in mine]
        rollout = engine.generate(prompts, n, args.max_new_tokens, temperature, top_p=top_p)
        texts = texts_of(rollout, tokenizer)
        verdicts = dataset.verifier(texts, [p.answer for _, p in mine for _ in range(n)])
        scores = [verdict.score for verdict in verdicts]
        failed = [verdict.failure != "" for verdict in verdicts]
        lengths, finished = rollout.mask.sum(1).int().tolist(), rollout.finished.tolist()
        for i, (number, p) in enumerate(mine):
            own = slice(i * n, (i + 1) * n)
            row = how | {"problem": number, "prompt": p.prompt, "answer": p.answer}
            row |= {"scores": scores[own], "lengths": lengths[own], "finished": finished[own]}
            rows.append(row | {"failed": failed[own], "responses": texts[own]})
        bar.update(len(numbers))
    everyones = [row for part in from_all(rows) for row in part]
    return sorted(everyones, key=lambda row: row["problem"])


def powers(n: int) -> list[int]:
    """List the k of pass@k: powers of two from 2 to n."""
    return [2**i for i in range(1, n.bit_length())]


def head(n: int) -> list[str]:
    """Write the first two lines of the table, for n responses to each problem."""
    cells = ["set", "T", "top-p", "problems", "n", "avg@n [95%]"]
    cells += [*(f"pass@{k} [95%]" for k in powers(n)), "length", "cut"]
    return [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|"]


def line_of(rows: list[dict], n: int) -> str:
    """Write the table's line for the rows of a set at a setting; n is the same as in `head`."""
    scores = torch.tensor([row["scores"] for row in rows], dtype=torch.float64)  # [problems, tries]
    right, tries = (scores >= 1).sum(dim=1), scores.shape[1]  # part marks count only in avg
    passed = [pass_at_k(right, tries, k) if k <= tries else None for k in powers(n)]
    shown = ["" if m is None else interval(m) for m in (scores.mean(dim=1), *passed)]
    length = torch.tensor([row["lengths"] for row in rows]).double().mean()
    cut = 1 - torch.tensor([row["finished"] for row in rows]).double().mean()
    cells = [rows[0]["set"], rows[0]["temperature"], rows[0]["top_p"], len(rows), tries, *shown]
    return f"| {' | '.join(map(str, [*cells, f'{length:.0f}', f'{cut:.3f}']))} |"


def interval(values: Tensor) -> str:
    """Write the mean of the problems' values, and its 95% interval."""
    return "{:.3f} [{:.3f}, {:.3f}]".format(values.mean(), *bootstrap(values))


def pass_at_k(right: Tensor, n: int, k: int) -> Tensor:
    """Compute the unbiased estimate `[problems]` of the chance that one of k responses is right,
    from `right` of n (2107.03374): 1 - C(n - right, k) / C(n, k)."""
    chances = [1 - math.comb(n - c, k) / math.comb(n, k) for c in right.tolist()]
    return torch.tensor(chances, dtype=torch.float64)


def bootstrap(values: Tensor) -> tuple[float, float]:
    """Compute the mean's 95% interval by resampling problems. With AIME's 30 it is wide."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    means = values[draws].mean(dim=1)  # [RESAMPLES]
    return tuple(means.quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist())


if __name__ == "__main__":
    launch(main, Args, prepare)

"""A run from start to end: what it writes into its folder, what stops it, and what it prints."""

import json
import math
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

from common.batch import Rollout
from common.cli import BadInput, Flags, RunStopped, blame, in_one_line, say, screen
from common.clock import SPENT, wait_for_gpu
from common.data import Task
from common.distributed import World, from_rank_0
from common.logprobs import sampler_gap
from common.metrics import Means, heat
from common.records.checkpoint import checkpoints, how_to_continue, step_of
from common.records.curves import draw_run
from common.records.files import append, new_folder, read_lines, saved_config, write
from common.records.resume import checkpoint_to_resume, cut_back, folder_to_resume
from common.records.samples import Samples, before_and_after
from common.records.summary import ending_of, equal_rewards, summary_of

START = time.perf_counter()  # about when the program started
MOST_SKIPPED = 3  # NaN or infinite gradients in a row that stop the run
MOST_APART = 3  # steps in a row that stop the run if sampler and trainer disagree in all of them
CHECK_REWARDS_AT = 3  # steps after which a run says whether rewards have differed at all
# The largest mean |log π_old - log μ| that we accept, by the lowest precision in use.
TOLERANCE = {"float32": 0.001, "bfloat16": 0.05, "float8": 0.1}
ON_THE_BAR = ("reward", "greedy", "tokens_per_s")  # metrics on the progress bar
# What the heat of a run does to a model on which it has been measured (labs/heat)
LEVELS = {"tiny": " (this model keeps what it learns up to 3.6e-4, and loses half at 7.6e-4)"}


class Run:
    """A run and its folder: config.json, metrics.jsonl, samples.jsonl, curves.png, summary.json and
    checkpoints/.

    A run makes a folder of its own, or with --resume continues in one that no other process uses,
    so it never moves or overwrites what another run has written.
    """

    def __init__(
        self, args: Flags, task: Task, world: World, algorithm: str, acted: dict[str, str]
    ):
        """Check what can be checked, and write nothing yet.

        `acted` maps metrics that show the algorithm at work to their titles in plots. The first one
        stays 0 while the algorithm's own mechanism does nothing.
        """
        self.args = args
        self.task = task
        self.world = world
        self.acted = next(iter(acted))
        self.since = START
        self.stopping = False
        self.wandb = None
        self.skipped = 0
        self.gaps_in_a_row = 0
        self.bar = tqdm(disable=True)
        self.samples = Samples(task, args, world)
        config = {"algorithm": algorithm, "acted": acted, "ranks": world.size}
        config |= asdict(args) | {"data": task.fingerprint}
        config["weights"] = from_rank_0(getattr(task.tokenizer, "weights", ""))  # of --model
        self.config = json.loads(json.dumps(config))  # tuples become lists, as in the file
        task_name = Path(args.task.replace(".py:", "-")).stem  # my/words.py:train -> words-train
        task_name = re.sub(r"[^\w.-]+", "-", task_name)
        name = args.run_dir or f"runs/{algorithm}-{task_name}-s{args.seed}"
        self.folder = Path(name)
        if task.fingerprint != from_rank_0(task.fingerprint):
            raise BadInput(f"--task {args.task}: other problems on other ranks: set order, chance?")
        self.checkpoint = None  # the checkpoint to continue from
        self.repair = None  # what --back_to changes: flag -> old and new value
        if args.back_to and args.resume == "no":
            raise BadInput(f"--back_to {args.back_to}: goes with --resume")
        if args.resume != "no":
            self.folder = from_rank_0(folder_to_resume(self.folder, bool(args.run_dir)))
            self.checkpoint, self.repair = checkpoint_to_resume(self.folder, args, self.config)
            if self.checkpoint is None:
                self.say(f"no checkpoint of this run in {self.folder}: starting anew")
            elif world.rank == 0:
                self._lock_folder()

    def _lock_folder(self) -> None:
        """Keep other processes out of the folder until this program ends."""
        lock = FileLock(self.folder / ".lock")
        with blame(f"--run_dir {self.folder}: cannot be used"):
            try:
                lock.acquire(blocking=False)
            except Timeout:
                raise BadInput(f"--resume: a run is under way in {self.folder}") from None
        self.world.closing.callback(lock.release)

    def start(self, done: int) -> None:
        """Make the run folder, now that all input has been checked, and announce the run."""
        args = self.args
        self.done = done
        if self.world.rank == 0:
            saved = saved_config(self.folder) if done else {}
            self.config["id"] = saved.get("id") or uuid4().hex[:12]  # because names may repeat
            self.config["history"] = saved.get("history", [])
            if self.repair is not None:
                self.config["id"] = uuid4().hex[:12]  # a new W&B run, which takes no step twice
                self.config["history"].append({"back_to": done, "changed": self.repair})
            if args.wandb:
                import wandb

                with blame(f"--wandb {args.wandb}: cannot be used"):
                    of_the_run = {"name": self.folder.name, "id": self.config["id"]}
                    of_the_run["config"] = self.config
                    self.wandb = wandb.init(project=args.wandb, resume="allow", **of_the_run)
            if done:
                cut_back(self.folder, done, args.steps, self.repair is not None)
            else:
                with blame(f"--run_dir {self.folder}: cannot be used"):
                    self.folder = new_folder(self.folder)
                self._lock_folder()
            write(self.folder / "config.json", json.dumps(self.config, indent=2) + "\n")
        self.folder = from_rank_0(self.folder)
        self.world.stop.listen()
        if self.wandb:
            self.wandb.name = self.folder.name  # perhaps run.2
        ranks = f"{self.world.size} rank(s) on {self.world.device}, {args.dtype}; {args.rollout}"
        self.say(
            f"{self.config['algorithm']}: {args.model} on {args.task}; {ranks} samples",
            f"steps {done + 1} to {args.steps}; results in {self.folder}",
            f"heat {heat(args.lr, args):.2g}{LEVELS.get(args.model, '')}",
        )
        SPENT["load"] += time.perf_counter() - self.since - sum(SPENT.values())

    def say(self, *lines: str) -> None:
        """Print on rank 0."""
        if lines and self.world.rank == 0:
            say(*lines)

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the steps to do, until a signal asks to stop. Rank 0 also shows a
        progress bar."""
        done, last = self.done, self.args.steps
        how = {"disable": self.world.rank > 0, "dynamic_ncols": True, "unit": "step"}
        with screen(sys.stderr):
            self.bar = tqdm(total=last, initial=done, **how)
        for step in range(done + 1, last + 1):
            if self.stopping:
                break
            yield step
            with screen(sys.stderr):
                self.bar.update()
        with screen(sys.stderr):
            self.bar.close()

    def due(self, step: int, every: int) -> bool:
        """Tell whether `every` divides this step, or it is the last one. After `log`, a signal may
        have made it the last one: such a step is saved, but not evaluated."""
        return step % every == 0 or step == self.args.steps or self.stopping

    def log(
        self, step: int, metrics: dict[str, float], minibatches: Sequence[Rollout] = ()
    ) -> None:
        """Append the step to metrics.jsonl and samples.jsonl, show it on the progress bar, and find
        out whether a signal asks the run to stop after this step."""
        example = metrics.pop("example", None)
        self.append_rows("samples.jsonl", self.samples.collect(step, example, minibatches))
        line = {"step": step} | metrics | self._seconds()
        if "lr" in metrics:
            line["heat"] = heat(metrics["lr"], self.args)
        line["tokens_per_s"] = metrics.get("tokens", 0) / line["seconds"]
        self.done = step
        self.stopping = self.world.stop.anywhere(self.world)
        self.append_rows("metrics.jsonl", [line])
        if step == CHECK_REWARDS_AT:
            self.say(*self._equal_rewards())
        if self.wandb:
            self.wandb.log(line, step=step)
        shown = [name for name in (*ON_THE_BAR, self.acted) if name in line]
        self.bar.set_postfix({name: f"{line[name]:.3g}" for name in shown}, refresh=False)

    def _seconds(self) -> dict[str, float]:
        """Return the seconds since the last line, in all and by phase."""
        wait_for_gpu()
        now = time.perf_counter()
        seconds = now - self.since
        self.since = now
        phases = {f"seconds_{phase}": spent for phase, spent in SPENT.items()}
        SPENT.clear()
        phases["seconds_update"] = seconds - sum(phases.values())  # everything that is not timed
        return phases | {"seconds": seconds}

    def append_rows(self, name: str, rows: list[dict]) -> None:
        """Append rows to a JSON-lines file of the run folder, on rank 0."""
        if rows and self.world.rank == 0:
            append(self.folder / name, rows)

    def check_gradient(self, norm: float, batch: Rollout) -> dict[str, tuple]:
        """Stop the run if MOST_SKIPPED gradients in a row were NaN or infinite, and save the last
        batch in its folder. `norm` is the gradient's norm, which is the same on every rank.

        Returns the metrics `grad_norm`, of applied gradients, and `skipped`, how many were not.
        """
        finite = math.isfinite(norm)
        self.skipped = 0 if finite else self.skipped + 1
        if self.skipped == MOST_SKIPPED:
            path = self.folder / f"bad_batch_rank{self.world.rank}.pt"
            torch.save(vars(batch), path)
            wrong = f"{MOST_SKIPPED} gradients in a row were NaN or infinite, none was applied"
            causes = "a learning rate, weight or penalty far too large, a mask or length of 0"
            raise RunStopped(f"{wrong}; the last batch is in {path}. Usual causes: {causes}.")
        # All ranks skip together. A total is summed over ranks, so each adds its share of 1.
        skipped = 0.0 if finite else 1 / self.world.size
        return {"grad_norm": (norm if finite else 0.0, finite), "skipped": (skipped, "sum")}

    def check_sampler(self, minibatches: list[Rollout]) -> dict[str, tuple]:
        """Stop the run if sampler and trainer disagree; else return the metrics of their gap.

        They disagree if the gap is above the tolerance in MOST_APART steps in a row, or once above
        ten times the tolerance. Every ratio would be wrong then, and nothing else would show it.
        """
        sampler = sampler_gap(minibatches)
        gap = Means().add(**sampler).reduce(self.world)["sampler_gap"]  # over all ranks
        precisions = (self.args.dtype, self.args.rollout_dtype)  # the second may be "auto"
        usual = max(TOLERANCE.get(precision, 0.0) for precision in precisions)
        tolerance = self.args.sampler_tolerance or usual
        self.gaps_in_a_row = 0 if gap <= tolerance else self.gaps_in_a_row + 1
        if self.gaps_in_a_row == MOST_APART or not gap <= 10 * tolerance:  # also true if gap is NaN
            wrong = f"mean |log π_old - log μ| is {gap:.2g}, tolerance {tolerance:.2g}"
            raise RunStopped(
                f"sampler and trainer disagree: {wrong}. Usual causes: weights not synced after "
                "the last update, a temperature or top-p that only one side applies, token ids "
                "re-encoded from text, a lower precision on one side (raise --sampler_tolerance)."
            )
        return sampler

    def _equal_rewards(self) -> list[str]:
        """Return the warning that no group has had unequal rewards; [] if one has, or need not."""
        if self.world.rank > 0 or not self.args.compares():
            return []
        return equal_rewards(read_lines(self.folder / "metrics.jsonl")[1:])

    def finish(self) -> None:
        """After the last step, write summary.json and print what happened. Draw the curves last: a
        run that has come to its end must not fail in matplotlib."""
        if self.world.rank > 0:
            return
        if self.done < self.args.steps:
            self.say(f"stopped after step {self.done}: {how_to_continue(self.folder)}")
        else:
            self._conclude()
        if self.done:
            try:
                self.say(f"curves   {draw_run(self.folder, self.config)}")
            except Exception as error:
                self.say(f"curves   cannot be drawn ({in_one_line(error)})")

    def _conclude(self) -> None:
        """Write summary.json and print what happened."""
        lines = read_lines(self.folder / "metrics.jsonl")
        if "greedy" not in lines[-1]:
            self.say(f"step {self.done} is not evaluated: a signal came; below is an earlier step")
        summary = summary_of(lines)
        write(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        equal = self._equal_rewards()
        self.say(*equal)
        samples = self.folder / "samples.jsonl"
        if samples.is_file():
            self.say(*before_and_after(read_lines(samples)), "")
        for how in ("greedy", "sampled"):
            before, after = summary[f"{how}_before"], summary[f"{how}_after"]
            self.say(f"held-out accuracy, {how:8} {before:.3f} -> {after:.3f}")
        self.say(f"greedy   {ending_of(summary)}", f"seconds  {summary['seconds']:.0f}")
        step, folder = summary["best_step"], shlex.quote(str(self.folder))
        if summary["fell"] and step in map(step_of, checkpoints(self.folder)):
            self.say(f"measure the best: python -m tools.evaluate {folder} --step {step}")
        acted = [line[self.acted] for line in lines if self.acted in line]
        if not acted:
            idle = f"{self.acted} has no value at any step: too few steps, or a flag turned it off"
        elif self.args.minibatches == 1:
            why = "with --minibatches 1 no clip or gate of r = π_θ/π_old can act, because r stays 1"
            idle = f"{self.acted} was 0 at every step: {why}; anything else never acted"
        else:
            idle = f"WARNING: {self.acted} was 0 at every step: it never acted (too few steps?)"
        if not equal and not any(acted):  # a null, which stands for NaN, does not count as acting
            self.say("", idle)
        if samples.is_file():
            self.say(f"\nlook at it: python -m tools.page {folder}")

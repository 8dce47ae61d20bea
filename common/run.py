"""A run: its folder with metrics, samples, curves and summary; resuming it; its messages."""

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from itertools import count, takewhile
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from tqdm import tqdm

from common.batch import Rollout
from common.cli import BadInput, Flags, RunStopped, blame, say
from common.clock import SECONDS, wait_for_gpu
from common.curves import draw_curves
from common.data import Task
from common.distributed import StopFlag, World
from common.logprobs import sampler_gap
from common.metrics import Means, fell
from common.model import check_saving
from common.samples import Samples, before_and_after


# What may change on resume: how long, where, how often, and what trades memory for time
FREE_ON_RESUME = set(
    """acted steps run_dir resume back_to keep save_every save_hf eval_every eval_samples
    sample_every wandb ranks shard_ranks micro_tokens rollout_rows sampler_tolerance
    gradient_checkpointing compile offload offload_reference vllm_memory vllm_sleep""".split()
)
# Flags of an algorithm's file that may not change even with --back_to: the sizes of a rollout
FIXED = {"prompts_per_step", "group_size", "max_new_tokens"}


def numbered(name: Path) -> Iterator[Path]:
    """The folders name, name.2, name.3, ..."""
    yield name
    for number in count(2):
        yield name.with_name(f"{name.name}.{number}")


def new_folder(name: Path) -> Path:
    """A new folder `name`, or, where that is not empty, name.2, name.3, ..."""
    for folder in numbered(name):
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            if not any(folder.iterdir()):
                # Of two runs that start at once only one makes this file.
                (folder / "metrics.jsonl").touch(exist_ok=False)
                return folder


def folder_to_resume(name: Path, named: bool) -> Path:
    """The folder `name`, if the user has named it and it has a checkpoint; else the newest of name,
    name.2, ... that has one. `name`, if there is none."""
    saved = [folder for folder in takewhile(Path.is_dir, numbered(name)) if checkpoints(folder)]
    if name in saved and named:
        return name
    return saved[-1] if saved else name


def checkpoints(folder: Path) -> list[Path]:
    """A run's checkpoints, oldest first; other names are ignored."""
    paths = (folder / "checkpoints").glob("step_*")
    complete = [path for path in paths if re.fullmatch("step_[0-9]{6,}", path.name)]
    return sorted(complete, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("step_"))


def how_to_continue(folder: Path) -> str:
    """Advice for a run in `folder` that had to stop."""
    return "go on with --resume" if checkpoints(folder) else "nothing is saved yet: start again"


def saved_config(folder: Path) -> dict:
    """config.json of the run in `folder`; empty if there is none or another program wrote it."""
    path = folder / "config.json"
    with blame(f"{path}: damaged, no JSON"):
        config = json.loads(path.read_bytes()) if path.is_file() else {}
        return config if {"algorithm", "acted", "task", "seed"} <= config.keys() else {}


def changed_flags(saved: dict, config: dict) -> list[str]:
    """The names under which two runs differ, but for those of FREE_ON_RESUME, and for what a run of
    an older version did not write."""
    names = config.keys() & saved.keys() - FREE_ON_RESUME - {"id", "history"}
    return sorted(name for name in names if saved[name] != config[name])


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Atomic writing: a path to write to, renamed to `path` at the end and removed on failure."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        sync(partial)  # else a power loss could leave the new name with nothing in it
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot do it for folders
            raise
    finally:
        os.close(descriptor)


def as_lines(rows: list[dict]) -> str:
    """Rows as JSON lines. JSON has no NaN and no infinities: they become null."""
    plain = (json.loads(json.dumps(row), parse_constant=lambda name: None) for row in rows)
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in plain)


def read_lines(path: Path) -> list[dict]:
    """The rows of a run's JSON-lines file, without a last one that a kill has cut short."""
    if not path.is_file():  # reading a pipe could wait for ever
        raise BadInput(f"{path}: no such file")
    lines = path.read_bytes().splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append(row | {"step": int(row["step"])})
        except (ValueError, TypeError, KeyError) as error:
            if number < len(lines):
                raise BadInput(f"{path}:{number}: damaged, repair or remove the line") from error
    return rows


START = time.perf_counter()  # of the program, nearly
MOST_SKIPPED = 3  # updates in a row with a gradient that is no number, before the run stops
MOST_APART = 3  # steps in a row in which sampler and trainer disagree, before the run stops
# Largest mean |log π_old - log μ| by the lowest precision in use.
TOLERANCE = {"float32": 0.001, "bfloat16": 0.05, "float8": 0.1}
ROWS = ("metrics.jsonl", "samples.jsonl")  # lines, cut back on resume
SHOWN = ("reward", "greedy", "tokens_per_s")  # on the progress bar


class Run:
    """The run folder: config.json, metrics.jsonl, samples.jsonl, curves.png, summary.json and
    checkpoints/.

    A run makes its own folder, or with --resume continues in one that no other process uses:
    nothing of another run is ever moved or written over.
    """

    def __init__(
        self, args: Flags, task: Task, world: World, algorithm: str, acted: dict[str, str]
    ):
        """`acted`: metrics that show the algorithm at work, and their words for plots.

        The first one stays 0 while the algorithm's own mechanism does nothing. Writes nothing yet.
        """
        self.args = args
        self.task = task
        self.world = world
        self.acted = next(iter(acted))
        self.since = START
        self.stopping = False
        self.wandb = None
        self.skipped = 0
        self.apart = 0
        self.bar = tqdm(disable=True)
        self.samples = Samples(task, args, world)
        config = {"algorithm": algorithm, "acted": acted, "ranks": world.size}
        config |= asdict(args) | {"data": task.fingerprint}
        config["weights"] = self._rank_0s(getattr(task.tokenizer, "weights", ""))  # of --model
        self.config = json.loads(json.dumps(config))  # as it will be read back: tuples as lists
        task_name = Path(args.task.replace(".py:", "-")).stem  # my/words.py:train -> words-train
        task_name = re.sub(r"[^\w.-]+", "-", task_name)
        name = args.run_dir or f"runs/{algorithm}-{task_name}-s{args.seed}"
        self.folder = Path(name).expanduser()
        if task.fingerprint != self._rank_0s(task.fingerprint):
            raise BadInput(f"--task {args.task}: other problems on other ranks: set order, chance?")
        self.checkpoint = None  # to continue from
        self.repair = None  # what --back_to changes: flag -> value before and after
        if args.back_to and not args.resume:
            raise BadInput(f"--back_to {args.back_to}: goes with --resume")
        if args.resume:
            self.folder = self._rank_0s(folder_to_resume(self.folder, bool(args.run_dir)))
            self._check_resume()

    def _rank_0s(self, value: object) -> object:
        """The first rank's value, on every rank."""
        shared = [value]
        dist.broadcast_object_list(shared)
        return shared[0]

    def _check_resume(self) -> None:
        """Choose the checkpoint, and refuse what cannot be resumed, before anything is loaded."""
        saved, back_to = checkpoints(self.folder), self.args.back_to
        if not saved:
            if self.args.resume != "auto":
                raise BadInput(f"--resume: no checkpoint in {self.folder}")
            self.say(f"no checkpoint of this run in {self.folder}: starting anew")
            return
        self.checkpoint = saved[-1]
        config = saved_config(self.folder)
        changed = changed_flags(config, self.config)
        history = config.get("history", [])
        gone_back = bool(history) and history[-1]["back_to"] == back_to
        if back_to and (changed or not gone_back):  # else the same command was started again
            steps = {step_of(path): path for path in saved}
            if back_to not in steps:
                there = ", ".join(map(str, steps))
                raise BadInput(f"--back_to {back_to}: {self.folder} has checkpoints of {there}")
            self.checkpoint = steps[back_to]
            self.repair = {}
        of_the_algorithm = set(asdict(self.args)) - {field.name for field in fields(Flags)}
        repairs = of_the_algorithm - FIXED | {"rollout_dtype"}  # what --back_to may change
        for name in changed:
            was, now = config.get(name), self.config[name]
            if self.repair is None or name not in repairs:
                raise BadInput(f"--resume: {self.folder} has {name} {was!r}, not {now!r}")
            self.repair[name] = [was, now]
        if self.world.rank == 0:
            self._lock_folder()

    def _lock_folder(self) -> None:
        """Let no other process use the folder until this program ends."""
        lock = FileLock(self.folder / ".lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise BadInput(f"--resume: a run is under way in {self.folder}") from None
        self.world.closing.callback(lock.release)

    def start(self, done: int) -> None:
        """Make the run folder, now that all input is known to be right, and say what comes."""
        args = self.args
        self.done = done
        if self.world.rank == 0:
            if args.save_hf:
                check_saving(args.model, self.task.tokenizer)
            saved = saved_config(self.folder) if done else {}
            self.config["id"] = saved.get("id") or uuid4().hex[:12]  # names may repeat
            self.config["history"] = saved.get("history", [])
            if self.repair is not None:
                self.config["id"] = uuid4().hex[:12]  # W&B takes no step twice
                self.config["history"].append({"back_to": done, "changed": self.repair})
            if args.wandb:
                import wandb

                with blame(f"--wandb {args.wandb}: cannot be used"):
                    self.wandb = wandb.init(
                        project=args.wandb,
                        name=self.folder.name,
                        id=self.config["id"],
                        resume="allow",
                        config=self.config,
                    )
            if done:
                self._continue()
            else:
                with blame(f"--run_dir {self.folder}: cannot be used"):
                    self.folder = new_folder(self.folder)
                self._lock_folder()
            self._write("config.json", json.dumps(self.config, indent=2) + "\n")
        self.folder = self._rank_0s(self.folder)
        self.stop = StopFlag()  # until here a signal ends the program at once
        if self.wandb:
            self.wandb.name = self.folder.name  # perhaps run.2
        ranks = f"{self.world.size} rank(s) on {self.world.device}, {args.dtype}; {args.rollout}"
        self.say(
            f"{self.config['algorithm']}: {args.model} on {args.task}; {ranks} samples",
            f"steps {done + 1} to {args.steps}; results in {self.folder}",
        )
        SECONDS["load"] = time.perf_counter() - self.since - sum(SECONDS.values())

    def _continue(self) -> None:
        """Forget what was done after the checkpoint; with --back_to, set it aside. Refuse without
        the metrics of every step."""
        if self.done > self.args.steps:
            raise BadInput(f"--steps {self.args.steps}: {self.folder} is at step {self.done}")
        kept, later = {}, {}
        for name in ROWS:
            if (self.folder / name).exists():
                rows = read_lines(self.folder / name)
                kept[name] = [row for row in rows if row["step"] <= self.done]
                later[name] = [row for row in rows if row["step"] > self.done]
        steps = [row["step"] for row in kept.get("metrics.jsonl", [])]
        if steps != list(range(self.done + 1)):
            path = self.folder / "metrics.jsonl"
            raise BadInput(f"--resume: {path} does not hold the steps 0 to {self.done}, each once")
        if self.repair is not None:
            self._set_aside(later)
        for name, rows in kept.items():
            self._write(name, as_lines(rows))
        (self.folder / "summary.json").unlink(missing_ok=True)  # of fewer steps

    def _set_aside(self, later: dict[str, list[dict]]) -> None:
        """Keep the lines and the checkpoints after the step of --back_to in a folder beside."""
        beside = new_folder(self.folder / f"after_{self.done}")
        for name, rows in later.items():
            self._write(f"{beside.name}/{name}", as_lines(rows))
        for path in checkpoints(self.folder):
            if step_of(path) > self.done:
                path.rename(beside / path.name)
        self.say(f"back to step {self.done}; what came after it is in {beside}")

    def _write(self, name: str, text: str) -> None:
        with atomic_write(self.folder / name) as path:
            path.write_text(text)

    def say(self, *lines: str) -> None:
        """Print on rank 0."""
        if lines and self.world.rank == 0:
            say(*lines)

    def steps(self) -> Iterator[int]:
        """The numbers of the steps still to do, or until a signal asks to stop; rank 0 shows a
        progress bar."""
        done, last = self.done, self.args.steps
        self.bar = tqdm(
            total=last, initial=done, disable=self.world.rank > 0, dynamic_ncols=True, unit="step"
        )
        self.world.closing.callback(self.bar.close)
        for step in range(done + 1, last + 1):
            if self.stopping:
                return
            yield step
            self.bar.update()

    def due(self, step: int, every: int) -> bool:
        """Whether this step is one of every `every`, or the last one. (After `log` also whether a
        signal has made it the last one: such a step is saved, but not evaluated.)"""
        return step % every == 0 or step == self.args.steps or self.stopping

    def log(
        self, step: int, metrics: dict[str, float], minibatches: Sequence[Rollout] = ()
    ) -> None:
        """Append the step to metrics.jsonl and samples.jsonl, and show it on the progress bar.

        Also finds out whether a signal asked the run to stop after this step."""
        example = metrics.pop("example", None)
        self.note("samples.jsonl", self.samples.collect(step, example, minibatches))
        line = {"step": step} | metrics | self._seconds()
        line["tokens_per_s"] = metrics.get("tokens", 0) / line["seconds"]
        self.done = step
        self.stopping = self.stop.anywhere(self.world)
        self.note("metrics.jsonl", [line])
        if self.wandb:
            self.wandb.log(line, step=step)
        shown = [name for name in (*SHOWN, self.acted) if name in line]
        self.bar.set_postfix({name: f"{line[name]:.3g}" for name in shown}, refresh=False)

    def _seconds(self) -> dict[str, float]:
        """The seconds since the last line, in all and by phase."""
        wait_for_gpu()
        now = time.perf_counter()
        seconds = now - self.since
        self.since = now
        phases = {f"seconds_{phase}": spent for phase, spent in SECONDS.items()}
        SECONDS.clear()
        phases["seconds_update"] = seconds - sum(phases.values())  # all that is not timed
        return phases | {"seconds": seconds}

    def note(self, name: str, rows: list[dict]) -> None:
        """Append rows to a JSON-lines file of the run folder, on rank 0."""
        if rows and self.world.rank == 0:
            with (self.folder / name).open("a") as file:
                file.write(as_lines(rows))
            sync(self.folder / name)

    def check_gradient(self, norm: float, batch: Rollout) -> dict[str, tuple]:
        """Stop the run if the norms of MOST_SKIPPED gradients in a row were no numbers, and leave
        the batch in its folder. The norm is the same on every rank.

        Returns the metrics `grad_norm` (of applied gradients) and `skipped` (how many were not).
        """
        finite = math.isfinite(norm)
        self.skipped = 0 if finite else self.skipped + 1
        if self.skipped == MOST_SKIPPED:
            path = self.folder / f"bad_batch_rank{self.world.rank}.pt"
            torch.save(vars(batch), path)
            wrong = f"{MOST_SKIPPED} gradients in a row were NaN or infinite, none was applied"
            causes = "a learning rate, weight or penalty far too large, a mask or length of 0"
            raise RunStopped(f"{wrong}; the last batch is in {path}. Usual causes: {causes}.")
        # All ranks skip together. A metric with the count None is summed over ranks: each adds its
        # part of one.
        skipped = 0.0 if finite else 1 / self.world.size
        return {"grad_norm": (norm if finite else 0.0, finite), "skipped": (skipped, None)}

    def check_sampler(self, minibatches: list[Rollout]) -> dict[str, tuple]:
        """Stop the run if sampler and trainer disagree; else return the metrics of the sampler.

        They disagree if the gap is above the tolerance in MOST_APART steps in a row, or above ten
        times the tolerance once. Then every ratio would be wrong, and nothing else would show it.
        """
        sampler = sampler_gap(minibatches)
        gap = Means().add(**sampler).reduce(self.world)["sampler_gap"]  # over all ranks
        precisions = (self.args.dtype, self.args.rollout_dtype)  # the second one may be "auto"
        usual = max(TOLERANCE.get(precision, 0.0) for precision in precisions)
        tolerance = self.args.sampler_tolerance or usual
        self.apart = 0 if gap <= tolerance else self.apart + 1
        if self.apart == MOST_APART or not gap <= 10 * tolerance:  # true for NaN
            wrong = f"mean |log π_old - log μ| is {gap:.2g}, tolerance {tolerance:.2g}"
            raise RunStopped(
                f"sampler and trainer disagree: {wrong}. Usual causes: weights not synced after "
                "the last update, a temperature or top-p that only one side applies, token ids "
                "re-encoded from text, a lower precision on one side (raise --sampler_tolerance)."
            )
        return sampler

    def finish(self) -> None:
        """Draw the curves; after the last step also write summary.json and say what happened."""
        if self.world.rank > 0:
            return
        self.bar.close()
        curves = draw_run(self.folder)
        if self.done < self.args.steps:
            self.say(f"stopped after step {self.done}: {how_to_continue(self.folder)}")
            return
        lines = read_lines(self.folder / "metrics.jsonl")
        summary = summary_of(lines)
        self._write("summary.json", json.dumps(summary, indent=2) + "\n")
        samples = self.folder / "samples.jsonl"
        if samples.is_file():
            self.say(*before_and_after(read_lines(samples)), "")
        for how in ("greedy", "sampled"):
            before, after = summary[f"{how}_before"], summary[f"{how}_after"]
            self.say(f"held-out accuracy, {how:8} {before:.3f} -> {after:.3f}")
        self.say(f"greedy   {ending_of(summary)}")
        self.say(f"curves   {curves}", f"seconds  {summary['seconds']:.0f}")
        acted = [line[self.acted] for line in lines if self.acted in line]
        if acted and not any(acted):  # null (a NaN) does not count as acting
            idle = f"{self.acted} was 0 at every step: the mechanism that it measures never acted"
            self.say(f"\nWARNING: {idle} (too few steps? --minibatches 1?).")
        if samples.is_file():
            self.say(f"\nlook at it: python -m tools.page {self.folder}")


def draw_run(folder: Path) -> Path:
    """Draw the run in `folder`; the path of its curves.png."""
    config = saved_config(folder)
    if not config:
        raise BadInput(f"{folder}: holds no run")
    figure = draw_curves(folder, config, read_lines(folder / "metrics.jsonl"))
    with atomic_write(folder / "curves.png") as partial:
        figure.savefig(partial, dpi=100, format="png")
    return folder / "curves.png"


def summary_of(lines: list[dict]) -> dict:
    """The first and the last held-out accuracy of a run, the best (greedy) with its step, whether
    the run fell, and its seconds."""
    measured = [line for line in lines if "greedy" in line]
    best = max(measured, key=lambda line: line["greedy"])
    summary = {"best": best["greedy"], "best_step": best["step"]}
    summary["fell"] = fell([line["greedy"] for line in measured])
    for how in ("greedy", "sampled"):
        summary[f"{how}_before"] = lines[0][how]
        summary[f"{how}_after"] = measured[-1][how]
    return summary | {"seconds": sum(line["seconds"] for line in lines)}


def ending_of(summary: dict) -> str:
    """`best 0.79 at step 5, now 0.18: it fell`"""
    best = f"best {summary['best']:.2f} at step {summary['best_step']}"
    ending = f"{best}, now {summary['greedy_after']:.2f}"
    return f"{ending}: it fell" if summary["fell"] else ending

"""What a run leaves behind: its folder with metrics, curves and summary, and what it says."""

import json
import math
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from common.batch import Rollout
from common.distributed import CLOSING, StopFlag, World
from common.plumbing.curves import draw_curves
from common.plumbing.errors import BadInput, RunStopped, blame
from common.plumbing.folder import as_lines, checkpoints, lock, new_folder, other_flags
from common.plumbing.folder import read_lines, runs_called, way_on, whole
from common.plumbing.metrics import Means
from common.plumbing.samples import Samples, as_table, before_and_after

MOST_SKIPPED = 3  # updates in a row with a gradient that is no number, before the run stops
MOST_IDLE = 0.9  # groups of equal rewards (share), above which the end of a run says so
MOST_APART = 3  # steps in a row in which sampler and trainer disagree, before the run stops
ROWS = ("metrics.jsonl", "samples.jsonl")  # line by line; cut back on resume
SHOWN = ("reward", "greedy", "tokens_per_s")  # on the progress bar
SHOWN_FROM = 0.001  # further metrics are shown from this size on: below it is rounding noise


class Run:
    """The run folder: config.json, metrics.jsonl, samples.jsonl, curves.png, summary.json and
    checkpoints/.

    A run makes its own folder, or with --resume goes on in one that it alone has open: nothing of
    another run is ever moved or written over.
    """

    # On the class: who reports a failure has no instance. `phase` is what is being done now.
    phase, bar, since = "", tqdm(disable=True), time.perf_counter()

    def __init__(
        self, args: object, task: object, world: World, algorithm: str, acted: dict[str, str]
    ):
        """`acted`: metrics that show the algorithm at work, and their words for plots.

        The first one stays 0 while the algorithm's own mechanism does nothing. Writes nothing yet.
        """
        self.args, self.task, self.world, self.acted = args, task, world, next(iter(acted))
        self.seconds, self.stopping = defaultdict(float), False
        self.wandb, self.skipped, self.apart = None, 0, 0
        self.samples = Samples(task, args)
        self.watch = self.samples.watch
        config = {"algorithm": algorithm, "acted": acted, "ranks": world.size}
        config |= asdict(args) | {"data": task.fingerprint}
        self.config = json.loads(json.dumps(config))  # as it will be read back: tuples as lists
        task_name = re.sub(r"[^\w.-]+", "-", Path(args.task.replace(".py:", "-")).stem)
        name = Path(args.run_dir or f"runs/{algorithm}-{task_name}-s{args.seed}").expanduser()
        self.folder = name if name.name not in ("", "..") else name.resolve()
        if args.resume and world.rank == 0:
            args.resume = self._take()
        self.folder, args.resume = self._agree_on(self.folder, args.resume)

    def _agree_on(self, *first: object) -> list:
        """What the first rank has, on every rank."""
        dist.broadcast_object_list(first := list(first))
        return first

    def _take(self) -> bool:
        """Go on with the newest run of this name and these flags, alone in its folder; False where
        there is none and `--resume auto` starts anew."""
        runs = runs_called(self.folder)
        same = [one for one in runs if not other_flags(one, self.config)]
        folder = (same or runs or [self.folder])[0]
        saved = checkpoints(folder)
        if self.args.resume == "auto" and not (same and saved):
            self.say(f"no checkpoint of this run in {folder}: starting anew")
            return False
        if saved and not same:
            raise BadInput(f"--resume: {folder} has {other_flags(folder, self.config)}")
        if not saved:
            raise BadInput(f"--resume: no checkpoint in {folder}")
        self.folder = folder
        CLOSING.append(partial(os.close, lock(folder, 180 * (self.args.resume == "auto"))))
        return True

    def start(self, done: int) -> None:
        """Make the run folder, now that all input is known to be right, and say what comes."""
        a, self.done = self.args, done
        with blame(f"--run_dir {self.folder}: cannot be used"):
            if self.world.rank == 0:
                self._open()
        (self.folder,) = self._agree_on(self.folder)
        self.stop = StopFlag()  # before, a signal ends at once
        if a.wandb and self.world.rank == 0:
            with blame(f"--wandb {a.wandb}: does not start"):  # no network, no login
                import wandb

                name = {"name": self.folder.name, "id": self.folder.name}
                self.wandb = wandb.init(project=a.wandb, config=self.config, resume="allow", **name)
        ranks = f"{self.world.size} rank(s) on {self.world.device}, {a.dtype}; {a.rollout} samples"
        plan = f"steps {done + 1} to {a.steps}, each {a.prompts_per_step} prompts x {a.group_size} "
        plan += f"responses in {a.minibatches} mini-batch(es); results in {self.folder}"
        idle = f"all {done} steps are done: to go on, give more --steps"
        self.say(f"{self.config['algorithm']}: {a.model} on {a.task}; {ranks}")
        self.say(plan if done < a.steps else idle, *self.task.remarks)

    def _open(self) -> None:
        """A folder of its own; or, with --resume, forget what was done after the checkpoint."""
        if self.args.resume:
            if self.done > self.args.steps:
                raise BadInput(f"--steps {self.args.steps}: {self.folder} is at step {self.done}")
            for path in filter(Path.exists, (self.folder / name for name in ROWS)):
                rows = [row for row in read_lines(path) if row["step"] <= self.done]
                if path.name == "metrics.jsonl":
                    self._keep_damaged(path, {row["step"] for row in rows})
                self._write(path.name, as_lines(rows))
            (self.folder / "summary.json").unlink(missing_ok=True)  # of fewer steps
        else:
            self.folder = new_folder(self.folder)
            CLOSING.append(partial(os.close, lock(self.folder)))
        self._write("config.json", json.dumps(self.config, indent=2) + "\n")

    def _keep_damaged(self, path: Path, steps: set[int]) -> None:
        """Say which steps are missing, as after a power loss, and keep a copy of the file."""
        lost = [str(step) for step in range(self.done + 1) if step not in steps]
        if lost:
            kept = path.with_name("metrics.jsonl.damaged")
            if not kept.exists():
                shutil.copy(path, kept)
            self.say(f"{path} lacks step {', '.join(lost)} for good; the file as it was is {kept}")

    def _write(self, name: str, text: str) -> None:
        with whole(self.folder / name) as path:
            path.write_text(text)

    def say(self, *lines: str) -> None:
        """Print on rank 0."""
        if lines and self.world.rank == 0:
            print(*lines, sep="\n", flush=True)

    def steps(self, done: int, last: int) -> Iterator[int]:
        """Step numbers from `done` + 1 to `last`, or until a signal asks to stop; behind a
        progress bar on rank 0."""
        look = {"disable": self.world.rank > 0, "dynamic_ncols": True, "unit": "step"}
        Run.bar = tqdm(total=last, initial=done, **look)
        for step in range(done + 1, last + 1):
            if self.stopping:
                return
            self.samples.step = step
            yield step
            self.bar.update()

    def clock(self, phase: str) -> None:
        """From here on time counts towards `phase`."""
        if self.world.device.type == "cuda":
            # Kernels run behind the host's back: without this their time lands elsewhere.
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[f"seconds_{Run.phase or 'load'}"] += now - self.since
        self.since, Run.phase = now, phase

    def due(self, step: int, every: int) -> bool:
        """Whether this step is one of every `every`, or the last one."""
        return step % every == 0 or step == self.args.steps or self.stopping

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append the step's line to metrics.jsonl and show it on the progress bar."""
        self.clock("log")
        example = metrics.pop("example", None)
        self.note("samples.jsonl", shown := self.samples.collect(step, example))
        seconds = sum(self.seconds.values())
        line = {"step": step} | metrics | self.seconds
        line |= {"tokens_per_s": metrics.get("tokens", 0) / seconds, "seconds": seconds}
        self.seconds.clear()
        self.note("metrics.jsonl", [line])
        self.done, self.stopping = step, self.stop.anywhere(self.world)
        if self.wandb:
            self.wandb.log(line | as_table(shown), step=step)
        more = [name for name in ("ref_kl", "sampler_kl", self.acted) if name in line]
        more = [name for name in more if not abs(line[name]) < SHOWN_FROM]  # NaN is shown
        shown = {name: f"{line[name]:.3g}" for name in (*SHOWN, *more) if name in line}
        self.bar.set_postfix(shown, refresh=False)

    def note(self, name: str, rows: list[dict]) -> None:
        """Append rows to a JSON-lines file of the run folder, on rank 0."""
        if rows and self.world.rank == 0:
            what = f"cannot write {self.folder / name}; {way_on(self.folder)} once that is fixed"
            with blame(what, RunStopped), (self.folder / name).open("a") as file:
                file.write(as_lines(rows))

    def gradient_is_finite(self, norm: float, batch: Rollout, means: Means) -> bool:
        """Whether to apply the gradient, by its norm, which is the same on every rank.

        Logs `grad_norm` (of applied gradients) and `skipped` (how many were not). After
        MOST_SKIPPED in a row the run stops, and leaves the batch in its folder.
        """
        finite = math.isfinite(norm)
        means.add(grad_norm=(norm if finite else 0.0, finite))
        # A count of None: summed over the ranks, not averaged. Each rank adds its part of one.
        means.add(skipped=((not finite) / self.world.size, None))
        self.skipped = 0 if finite else self.skipped + 1
        if self.skipped == MOST_SKIPPED:
            torch.save(vars(batch), path := self.folder / f"bad_batch_rank{self.world.rank}.pt")
            wrong = f"{MOST_SKIPPED} gradients in a row were NaN or infinite, none was applied"
            causes = "a learning rate, weight or penalty far too large, a mask or length of 0"
            raise RunStopped(f"{wrong}; the last batch is in {path}. Usual causes: {causes}.")
        return finite

    def check_sampler(self, sampler: dict[str, float]) -> dict[str, float]:
        """The same metrics of the sampler; the run stops where its gap to the trainer is beyond the
        tolerance in MOST_APART steps in a row, or ten times beyond: every ratio would be wrong
        without a word.
        """
        precision, gap = {self.args.dtype, self.args.rollout_dtype}, sampler["sampler_gap"]
        usual = 0.1 if "float8" in precision else 0.05 if "bfloat16" in precision else 1e-3
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
        with blame(f"cannot write the results to {self.folder}", RunStopped):
            curves, lines = draw_curves(self.folder), read_lines(self.folder / "metrics.jsonl")
            if self.done < self.args.steps:
                return self.say(f"stopped after step {self.done}: {way_on(self.folder)}")
            first, *_, last = [line for line in lines if "greedy" in line] * 2
            both, split = ("greedy", "sampled"), defaultdict(float)
            summary = {f"{how}_before": first[how] for how in both}
            summary |= {f"{how}_after": last[how] for how in both}
            for name, value in (pair for line in lines for pair in line.items()):
                if name.startswith("seconds_"):
                    split[name.removeprefix("seconds_")] += value
            summary |= {"seconds": sum(line["seconds"] for line in lines), "seconds_split": split}
            self._write("summary.json", json.dumps(summary, indent=2) + "\n")
        phases = ", ".join(f"{phase} {spent:.1f}" for phase, spent in split.items())
        if (samples := self.folder / "samples.jsonl").is_file():
            self.say(*before_and_after(read_lines(samples)))
        self.say(
            f"\nheld-out accuracy, greedy   {first['greedy']:.3f} -> {last['greedy']:.3f}",
            f"held-out accuracy, sampled  {first['sampled']:.3f} -> {last['sampled']:.3f}",
            f"curves   {curves}",
            f"seconds  {summary['seconds']:.0f}: {phases}",
        )
        if killed := sum(line.get("judge_killed", 0) for line in lines):
            self.say(f"\n{killed:.0f} answers broke the verifier's bounds, or your reward")
        acted = [line[self.acted] for line in lines if self.acted in line]
        if acted and not any(acted):  # null, a NaN, is no deed either; without any it was off
            idle = f"{self.acted} was 0 at every step: what it measures never acted"
            self.say(f"\nWARNING: {idle} (too few steps? --minibatches 1?).")
        idle = [line["zero_groups"] for line in lines if "zero_groups" in line]
        if self.args.compares() and idle and sum(idle) > MOST_IDLE * len(idle):
            share = f"in {sum(idle) / len(idle):.0%} of the groups all rewards were equal"
            self.say(f"\nWARNING: {share}, and such a group teaches nothing (docs/diagnose.md).")
        if min(last[how] - first[how] for how in both) < 0:
            self.say("\nWARNING: held-out accuracy ended below its start.")
        if samples.is_file():
            self.say(f"\nlook at it: python -m tools.page {self.folder}")

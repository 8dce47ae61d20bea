"""What a run leaves behind: metrics, progress bar, curves and summary in its folder."""

import contextlib
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from common.batch import Rollout
from common.checkpoint import newest_whole
from common.curves import draw_curves
from common.distributed import CLOSING, BadInput, Refused, RunStopped, World
from common.distributed import blame, global_sum, together
from common.folder import ROWS, Claim, append, as_lines, holds_a_run, read_lines, saved_config
from common.folder import spelled_out, whole

# A file may clock others, too.
PHASES = ("rollout", "reward", "old_logp", "update", "sync", "evaluate", "save")
MOST_SKIPPED = 3  # updates in a row with a gradient that is no number, before the run stops
MOST_APART = 3  # steps in a row in which sampler and trainer disagree, before the run stops
FREE_ON_RESUME = set("acted steps run_dir resume save_every save_hf eval_every".split())
FREE_ON_RESUME |= {"eval_samples", "wandb", "ranks", "shard_ranks"}
SHOWN = ("reward", "greedy", "ref_kl", "sampler_kl")  # on the progress bar


class Means:
    """Metrics of a step as (sum, count): exact means over any micro-batches and ranks.

    A count of None leaves the sum as it is; a name that ends in `_max` takes the maximum instead.
    Where nothing was counted there is no mean, and the metric is left out of the step.
    """

    def __init__(self):
        self.sums = defaultdict(lambda: torch.tensor(0.0))
        self.counts, self.plain = defaultdict(float), set()

    def add(self, **pairs: tuple[Tensor | float, Tensor | float | None]) -> None:
        for name, (total, count) in pairs.items():
            number = not isinstance(total, Tensor)
            value = torch.tensor(float(total)) if number else total.detach().double()
            combine = torch.maximum if name.endswith("_max") else torch.add
            self.sums[name] = combine(self.sums[name], value)
            self.counts[name] = self.counts[name] + (0.0 if count is None else count)
            if count is None:
                self.plain.add(name)

    def reduce(self, world: World) -> dict[str, float]:
        """Every metric over all ranks."""
        sums, counts = global_sum(self.sums, world), global_sum(self.counts, world)
        means = {name: sums[name] / counts[name] for name in self.sums if counts[name]}
        return means | {name: sums[name] for name in self.plain}


def by_sign(entropy: Tensor, batch: Rollout) -> dict[str, tuple[Tensor, Tensor]]:
    """Entropy `[n, T]` per token, and of good (Â > 0) and bad rows (Â < 0) apart; and tokens per
    row of both. Means for all rows hide what a collapse does first: only bad ones grow longer.
    """
    found = {"entropy": (entropy.sum(), batch.mask.sum())}
    for name, rows in (("good", batch.advantages > 0), ("bad", batch.advantages < 0)):
        tokens = batch.mask[rows].sum()
        found[f"entropy_{name}"] = entropy[rows].sum(), tokens
        found[f"len_{name}"] = tokens, rows.sum()
    return found


class Run:
    """The run folder: config.json, metrics.jsonl, curves.png, summary.json, checkpoints/."""

    phase = ""  # what is being done now, for messages about failures
    bar: tqdm | None = None

    def __init__(self, args: object, world: World, algorithm: str, acted: dict[str, str]):
        """`acted`: metrics that show the algorithm at work, and their words for plots.

        The first one stays 0 while the algorithm's own mechanism does nothing. Takes the run
        folder's lock, and changes nothing in it yet.
        """
        self.args, self.world, self.algorithm = args, world, algorithm
        self.acted = next(iter(acted))
        task = re.sub(r"[^\w.-]+", "-", Path(args.task).stem)
        self.folder = spelled_out(args.run_dir or f"runs/{algorithm}-{task}-s{args.seed}")
        self.checkpoints, self.metrics = self.folder / "checkpoints", self.folder / "metrics.jsonl"
        self.seconds, self.started = dict.fromkeys(PHASES, 0.0), time.perf_counter()
        self.wandb, self.skipped, self.apart = None, 0, 0
        if args.resume == "auto":
            args.resume = self._can_resume()
        config = asdict(args) | {"algorithm": algorithm, "acted": acted, "ranks": world.size}
        self.config = json.loads(json.dumps(config))  # as it will be read back: tuples as lists
        with together(world, Refused, f"--run_dir {self.folder}: cannot be used"):
            if world.rank == 0:
                self._check_same() if args.resume else holds_a_run(self.folder)
                self.claim = Claim(self.folder)
                CLOSING.append(self.claim.release)

    def _can_resume(self) -> bool:
        """What `--resume auto` means here: whether the folder has a whole checkpoint."""
        try:
            newest_whole(self.checkpoints, self.world, "--resume auto")
        except Refused as error:
            self.say(f"{error}: starting anew")
            return False
        return True

    def _check_same(self) -> None:
        """To resume needs the same run: the same algorithm, task, shapes."""
        saved, own = saved_config(self.folder), self.config
        if not saved:
            raise BadInput(f"--resume: no run in {self.folder}")
        for name in sorted(own.keys() - FREE_ON_RESUME):
            if saved.get(name) != own[name]:
                wrong = f"{self.folder} has {name} {saved.get(name)!r}, this run {own[name]!r}"
                raise BadInput(f"--resume: {wrong}")
        lines = read_lines(self.metrics) if self.metrics.is_file() else []
        if not any("greedy" in line for line in lines):
            raise BadInput(f"--resume: {self.metrics} is missing or holds no measurement")

    def start(self, task: object, done: int) -> None:
        """Make the run folder, now that all input is known to be right, and say what comes."""
        a, self.task, self.begun = self.args, task, done
        self.config["data"] = task.fingerprint
        dist.barrier()  # every rank has read what it resumes from before the first one writes
        with together(self.world, Refused, f"--run_dir {self.folder}: cannot be written to"):
            if self.world.rank == 0:
                self._open(done)
        ranks = f"{self.world.size} rank(s) on {self.world.device}"
        self.say(
            f"{self.algorithm}: {a.model} on {task.name}; {ranks}, {a.dtype}; {a.rollout} samples"
        )
        rows = a.prompts_per_step * a.group_size
        batch = f"{a.prompts_per_step} prompts x {a.group_size} responses = {rows}"
        held_out = f"{len(task.held_out)} held-out problems every {a.eval_every} steps"
        plan = f"steps {done + 1} to {a.steps}, each {batch}, {a.minibatches} mini-batch(es)"
        idle = f"all {done} steps are done: to go on, give more --steps"
        self.say(f"{plan}; {held_out}" if done < a.steps else idle)
        dropped = f"; {len(task.dropped)} prompts too long so far, skipped" if task.dropped else ""
        self.say(f"results in {self.folder}{dropped}", *task.remarks)

    def _open(self, done: int) -> None:
        """Refuse what only now can be known, then write config.json and metrics up to `done`."""
        a, kept = self.args, {}
        if a.resume:
            if saved_config(self.folder).get("data", self.config["data"]) != self.config["data"]:
                raise BadInput(f"--resume: the file behind --task {a.task} changed since the start")
            if done > a.steps:
                raise BadInput(f"--steps {a.steps}: {self.folder} is at step {done} already")
            for path in filter(Path.exists, (self.folder / name for name in ROWS)):
                kept[path] = [row for row in read_lines(path) if row["step"] <= done]
            for row in kept[self.metrics][-1:] if hasattr(self.task.judge, "killed") else ():
                self.task.judge.killed += int(row.get("judge_killed") or 0)  # of the whole run
        if a.wandb:
            import wandb

            name = self.folder.name
            options = {"name": name, "id": name, "config": self.config, "resume": "allow"}
            with blame(f"--wandb {a.wandb}: does not start"):  # no network, no login
                self.wandb = wandb.init(project=a.wandb, **options)
        if not a.resume and holds_a_run(self.folder):
            aside = self.claim.renew(self._write_config)
            print(f"an earlier run was in {self.folder}: moved to {aside}")
        else:
            self._write_config(self.folder)
        self.checkpoints.mkdir(exist_ok=True)
        for path, rows in kept.items():  # forget the steps that were done after the checkpoint
            with whole(path) as partial:
                partial.write_text(as_lines(rows))

    def _write_config(self, folder: Path) -> None:
        with whole(folder / "config.json") as partial:
            partial.write_text(json.dumps(self.config, indent=2) + "\n")

    def say(self, *lines: str) -> None:
        """Print on rank 0."""
        if lines and self.world.rank == 0:
            print(*lines, sep="\n", flush=True)

    def steps(self, done: int) -> Iterator[int]:
        """Step numbers from `done` + 1 to `--steps`, behind a progress bar on rank 0."""
        look = {"disable": self.world.rank > 0, "dynamic_ncols": True, "unit": "step"}
        Run.bar = tqdm(total=self.args.steps, initial=done, **look)
        for step in range(done + 1, self.args.steps + 1):
            yield step
            self.bar.update()

    @contextlib.contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Count the time inside towards `phase`."""
        start, Run.phase = self._now(), phase
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self._now() - start

    def _now(self) -> float:
        if self.world.device.type == "cuda":
            # Kernels run behind the host's back: without this their time lands elsewhere.
            torch.cuda.synchronize()
        return time.perf_counter()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append the step's line to metrics.jsonl and show it on the progress bar."""
        seconds = self._now() - self.started
        line = {"step": step} | metrics
        line |= {"tokens_per_s": metrics.get("tokens", 0) / seconds, "seconds": seconds}
        line |= {f"seconds_{phase}": spent for phase, spent in self.seconds.items()}
        self.started += seconds
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.note(self.metrics.name, [line])
        if self.wandb:
            self.wandb.log(line, step=step)
        if self.bar is not None:
            shown = [name for name in (*SHOWN, self.acted, "tokens_per_s") if name in line]
            self.bar.set_postfix({name: f"{line[name]:.3g}" for name in shown}, refresh=False)

    def healthy(self, norm: float, batch: object) -> bool:
        """Whether the gradient is a number (its norm, the same on every rank), or to be skipped.

        The batch that is skipped is left in the run folder; after MOST_SKIPPED in a row the run
        stops.
        """
        self.skipped = 0 if math.isfinite(norm) else self.skipped + 1
        if self.skipped:
            path = self.folder / f"bad_batch_rank{self.world.rank}.pt"
            # A full disk: go on, or stop, for the better reason.
            with contextlib.suppress(OSError, RuntimeError):
                torch.save(vars(batch), path)
            if self.skipped == MOST_SKIPPED:
                raise RunStopped(
                    f"{MOST_SKIPPED} gradients in a row were NaN or infinite, none was applied; "
                    f"the last batch is in {path}. Usual causes: a learning rate, weight or "
                    "penalty far too large, a mask or length of 0."
                )
        return not self.skipped

    def trusted(self, sampler: dict[str, float]) -> dict[str, float]:
        """The same metrics of the sampler; the run stops where its gap to the trainer is beyond the
        tolerance in MOST_APART steps in a row, or ten times beyond: every ratio would be wrong
        without a word.
        """
        args, gap = self.args, sampler["sampler_gap"]
        precision = {args.dtype, args.dtype if args.rollout_dtype == "auto" else args.rollout_dtype}
        usual = 0.1 if "float8" in precision else 0.05 if "bfloat16" in precision else 1e-3
        tolerance = args.sampler_tolerance or usual
        self.apart = 0 if gap <= tolerance else self.apart + 1
        if self.apart:
            wrong = f"mean |log π_old - log μ| is {gap:.2g}, tolerance {tolerance:.2g}"
            if self.apart == MOST_APART or not gap <= 10 * tolerance:  # true for NaN
                raise RunStopped(
                    f"sampler and trainer disagree: {wrong}. Usual causes: weights not synced "
                    "after the last update, a temperature or top-p that only one side applies, "
                    "token ids re-encoded from text, a lower precision on one side (then raise "
                    "--sampler_tolerance)."
                )
            self.say(
                f"\nsampler and trainer disagree: {wrong}; {MOST_APART} steps so: the run stops"
            )
        return sampler

    def note(self, name: str, rows: list[dict]) -> None:
        """Append rows to a JSON-lines file of the run folder, on rank 0; all ranks call it."""
        what = f"cannot write {self.folder / name}: mend that and go on with --resume"
        with together(self.world, RunStopped, what):
            if rows and self.world.rank == 0:
                self.claim.hold()
                append(self.folder / name, rows)

    def finish(self, done: int) -> None:
        """Draw the curves; after the last step also write summary.json and say what happened."""
        killed = global_sum({"killed": self.task.killed}, self.world)["killed"]
        dropped = [set()] * self.world.size  # rows; of a resumed run, those since
        dist.all_gather_object(dropped, self.task.dropped)
        with together(self.world, RunStopped, f"cannot write the results to {self.folder}"):
            if self.world.rank == 0:
                self.bar.close()
                self.claim.hold()
                if killed:
                    self.say(f"\n{killed:.0f} answers broke the judge's time or memory bounds")
                if dropped := set().union(*dropped):
                    self.say(f"\n{len(dropped)} prompts were met that are too long, and skipped")
                self._conclude(done)
                self.claim.release()

    def _conclude(self, done: int) -> None:
        history, curves = read_lines(self.metrics), draw_curves(self.folder)
        if done < self.args.steps:
            self.say(f"stopped after step {done} of {self.args.steps}, saved: go on with --resume")
            return
        evaluated = [line for line in history if "greedy" in line]
        first, last = evaluated[0], evaluated[-1]
        total = sum(line["seconds"] for line in history) + self._now() - self.started
        split = self.seconds  # since the last line: its checkpoint
        for line in history:
            for name in line.keys() - {"seconds"}:
                if name.startswith("seconds_"):
                    phase = name.removeprefix("seconds_")
                    split[phase] = split.get(phase, 0.0) + line[name]
        split["other"] = total - sum(split.values())
        summary = {f"{how}_before": first[how] for how in ("greedy", "sampled")}
        summary |= {f"{how}_after": last[how] for how in ("greedy", "sampled")}
        summary |= {"seconds": total, "seconds_split": split}
        path = self.folder / "summary.json"
        if done > self.begun or not path.exists():
            with whole(path) as partial:
                partial.write_text(json.dumps(summary, indent=2) + "\n")
        spent = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in split.items())
        self.say(
            f"\nheld-out accuracy, greedy   {first['greedy']:.3f} -> {last['greedy']:.3f}",
            f"held-out accuracy, sampled  {first['sampled']:.3f} -> {last['sampled']:.3f}",
            f"curves   {curves}",
            f"metrics  {self.metrics}",
            f"seconds  {total:.0f}: {spent}",
        )
        if not any(line.get(self.acted) for line in history):  # null, a NaN, is no deed either
            idle = f"{self.acted} was 0 at every step: what it measures never acted"
            self.say(f"\nWARNING: {idle} (too few steps? --minibatches 1?).")
        fallen = ", ".join(how for how in ("greedy", "sampled") if last[how] < first[how])
        if fallen:
            self.say(f"\nWARNING: held-out accuracy ({fallen}) ended below its start.")

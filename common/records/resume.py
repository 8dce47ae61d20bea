"""Which checkpoint does a run continue from, and may it?"""

from dataclasses import asdict, fields
from itertools import takewhile
from pathlib import Path

from common.cli import BadInput, Flags, say
from common.records.checkpoint import checkpoints, step_of
from common.records.files import as_lines, new_folder, numbered, read_lines, saved_config, write

# What may change on resume: how long, where and how often, and what trades memory for time.
FREE_ON_RESUME = set(
    """acted steps run_dir resume back_to keep save_every save_hf eval_every eval_samples
    sample_every wandb ranks shard_ranks micro_tokens rollout_rows sampler_tolerance
    gradient_checkpointing compile offload offload_reference vllm_memory vllm_sleep""".split()
)
# Flags of an algorithm's file that must not change even with --back_to: the sizes of a rollout.
ROLLOUT_SIZES = {"prompts_per_step", "group_size", "max_new_tokens"}


def folder_to_resume(name: Path, named: bool) -> Path:
    """Return `name` if the user has named it and it has a checkpoint, else the last of name,
    name.2, ... with a checkpoint. If none has a checkpoint, return `name`."""
    saved = [folder for folder in takewhile(Path.is_dir, numbered(name)) if checkpoints(folder)]
    if name in saved and named:
        return name
    return saved[-1] if saved else name


def checkpoint_to_resume(
    folder: Path, args: Flags, config: dict
) -> tuple[Path | None, dict | None]:
    """Return (checkpoint, changes) for a run with this config that continues in `folder`; refuse
    another run's folder. The checkpoint is None if `--resume auto` finds none. `changes` maps each
    flag that --back_to changes to its old and new value; it is None for a plain resume."""
    saved = checkpoints(folder)
    if not saved and args.resume == "auto":
        return None, None
    if not saved:
        raise BadInput(f"--resume: no checkpoint in {folder}")
    before = saved_config(folder)
    changed = {}  # without flags that an older version of this program did not write
    for name in sorted(config.keys() & before.keys() - FREE_ON_RESUME - {"id", "history"}):
        if before[name] != config[name]:
            changed[name] = [before[name], config[name]]
    history = before.get("history", [])
    # Was this --back_to done already, and the same command is run again?
    gone_back = bool(history) and history[-1]["back_to"] == args.back_to and not changed
    going_back = args.back_to > 0 and not gone_back
    steps = {step_of(path): path for path in saved}
    if going_back and args.back_to not in steps:
        there = ", ".join(map(str, steps))
        raise BadInput(f"--back_to {args.back_to}: {folder} has checkpoints of {there}")
    may_change = set()  # flags
    if going_back:
        of_the_algorithm = asdict(args).keys() - {field.name for field in fields(Flags)}
        may_change = of_the_algorithm - ROLLOUT_SIZES | {"rollout_dtype"}
    for name, (was, now) in changed.items():
        if name not in may_change:
            raise BadInput(f"--resume: {folder} has {name} {was!r}, not {now!r}")
    if going_back:
        return steps[args.back_to], changed
    return saved[-1], None


def cut_back(folder: Path, done: int, last: int, going_back: bool) -> None:
    """Remove what a run of `last` steps wrote after step `done`, or with --back_to move it into a
    folder after_<done>. Refuse if metrics.jsonl lacks a step."""
    if done > last:
        raise BadInput(f"--steps {last}: {folder} is at step {done}")
    kept, later = {}, {}
    for name in ("metrics.jsonl", "samples.jsonl"):
        if (folder / name).exists():
            rows = read_lines(folder / name)
            kept[name] = [row for row in rows if row["step"] <= done]
            later[name] = [row for row in rows if row["step"] > done]
    steps = [row["step"] for row in kept.get("metrics.jsonl", [])]
    if steps != list(range(done + 1)):
        path = folder / "metrics.jsonl"
        raise BadInput(f"--resume: {path} does not hold the steps 0 to {done}, each once")
    if going_back:
        beside = new_folder(folder / f"after_{done}")
        for name, rows in later.items():
            write(beside / name, as_lines(rows))
        for path in checkpoints(folder):
            if step_of(path) > done:
                path.rename(beside / path.name)
        say(f"back to step {done}; what came after it is in {beside}")
    for name, rows in kept.items():
        write(folder / name, as_lines(rows))
    (folder / "summary.json").unlink(missing_ok=True)  # it describes steps that are removed

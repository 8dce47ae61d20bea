"""The summary of a run: its accuracy at the start, at its best and at the end."""

from collections.abc import Sequence

LOST = 0.8  # times the best accuracy, if it is positive: a run that ends below this has fallen


def fell(accuracies: Sequence[float]) -> bool:
    """Tell whether a run with these held-out accuracies, in order, has fallen: it ends below LOST
    times its best, which must be positive. This is the only definition of a fall
    (docs/glossary.md)."""
    return max(accuracies) > 0 and accuracies[-1] < LOST * max(accuracies)


def summary_of(lines: list[dict]) -> dict:
    """Summarise the lines of metrics.jsonl: first and last held-out accuracy, the best one (greedy)
    and its step, whether the run fell, and its seconds."""
    measured = [line for line in lines if "greedy" in line]
    best = max(measured, key=lambda line: line["greedy"])
    summary = {"best": best["greedy"], "best_step": best["step"]}
    summary["fell"] = fell([line["greedy"] for line in measured])
    for how in ("greedy", "sampled"):
        summary[f"{how}_before"] = lines[0][how]
        summary[f"{how}_after"] = measured[-1][how]
    return summary | {"seconds": sum(line["seconds"] for line in lines)}


def ending_of(summary: dict) -> str:
    """Say how a run ended, as `best 0.79 at step 5, now 0.18: it fell`."""
    best = f"best {summary['best']:.2f} at step {summary['best_step']}"
    ending = f"{best}, now {summary['greedy_after']:.2f}"
    return f"{ending}: it fell" if summary["fell"] else ending


def equal_rewards(lines: Sequence[dict]) -> list[str]:
    """Return a warning if at all these steps the rewards of every group were equal; else []."""
    if not all(line.get("zero_groups") == 1 for line in lines):
        return []
    mean = sum(line["reward"] for line in lines) / len(lines)
    hints = {0: ": is an answer found? See samples.jsonl", 1: ": the task is too easy"}
    cut = sum(line["truncated"] for line in lines) / len(lines)
    if cut > 0.9:
        hints[0] = f": {cut:.0%} of the responses were cut at --max_new_tokens, raise it"
    equal = f"in {len(lines)} steps the rewards of every group were equal, {mean:.3g} on average"
    return [f"\nWARNING: nothing to learn from: {equal}{hints.get(mean, '')}"]

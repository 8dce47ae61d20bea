"""Run folders made by hand, and a group of responses as samples.jsonl has it."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch

from tests.helpers import module_of

COLUMNS = ("logp", "old_logp", "rollout_logp", "ref_logp", "teacher_logp", "entropy")


def write_lines(path: Path, rows: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics_of(steps: int, seed: int = 0) -> list[dict]:
    """Rows of a run that measures at every tenth step, other numbers for each seed."""
    generator = torch.Generator().manual_seed(seed)
    names = "reward response_len entropy grad_norm seconds clip_share".split()
    lines = [{"step": 0, "seconds": 1.0}]
    for step in range(1, steps + 1):
        values = (0.1 + torch.rand(len(names), generator=generator)).tolist()
        lines.append({"step": step, "tokens": 1000 + step} | dict(zip(names, values)))
    for line in lines[::10]:
        line["greedy"], line["sampled"] = torch.rand(2, generator=generator).tolist()
    return lines


def a_run(folder: Path, lines: list[dict], algorithm: str = "grpo", **config: object) -> Path:
    """A run folder with these metrics, its flags the algorithm's defaults and `config`."""
    folder.mkdir(parents=True, exist_ok=True)
    module = module_of(algorithm)
    flags = asdict(module.Args()) | {"algorithm": algorithm, "acted": module.ACTED, "ranks": 1}
    (folder / "config.json").write_text(json.dumps(flags | {"model": "tiny"} | config))
    write_lines(folder / "metrics.jsonl", lines)
    return folder


def a_group() -> dict[str, torch.Tensor]:
    """Four responses of unlike length with ratios beyond every clip, a gap and a reference."""
    generator = torch.Generator().manual_seed(5)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(4, 7, generator=generator, dtype=torch.float64)

    mask = (torch.arange(7) < torch.tensor([[7], [3], [5], [6]])).double()
    old = -noise(1.5).abs() - 0.05
    batch = {
        "logp": (old + noise(0.3)).clamp(max=-1e-3),
        "old_logp": old,
        "rollout_logp": (old + noise(0.02)).clamp(max=-1e-3),
        "ref_logp": (old + noise(0.5)).clamp(max=-1e-3),
        "entropy": noise(1).abs(),
    }
    batch = {name: column * mask for name, column in batch.items()}
    return batch | {"mask": mask, "advantages": torch.tensor([1.5, -0.5, -0.5, -0.5]).double()}


def row_of(batch: dict[str, torch.Tensor], **more: object) -> dict:
    """A row of samples.jsonl, of a mini-batch that is this group."""
    responses = []
    for i, length in enumerate(batch["mask"].sum(1).long().tolist()):
        answer = {"text": f"response {i}", "given": "", "reward": float(i == 0), "finished": True}
        answer |= {"advantage": batch["advantages"][i].item(), "ids": list(range(length))}
        answer |= {"tokens": [f"t{t}" for t in range(length)], "weight": [0.0] * length}
        for name in COLUMNS:
            if name in batch:
                answer[name] = batch[name][i, :length].tolist()
        responses.append(answer)
    row = {"step": 1, "minibatch": 1, "minibatches": 1, "group": 0}
    row |= {"rows": len(responses), "tokens": int(batch["mask"].sum())}
    return row | {"prompt": "1+1=", "answer": "2", "responses": responses} | more


def with_samples(folder: Path, rows: list[dict], algorithm: str = "grpo", **config: object) -> Path:
    """A run folder with these rows of samples.jsonl."""
    a_run(folder, metrics_of(9), algorithm, **config)
    write_lines(folder / "samples.jsonl", rows)
    return folder

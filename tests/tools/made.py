"""Run folders made by hand."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from common.records.files import as_lines

from tests.helpers import module_of

# Texts that would do harm if a page read them as HTML or as a program
HOSTILE = [
    "</script><script>document.body.remove()</script>",
    "<img src=x onerror=document.body.remove()>",
    "<!-- <b>&amp;&lt; {{data}} {{shared}}",
    "\"'`${document.body.remove()}`\\u003c",
]


def metrics_of(steps: int, seed: int = 0) -> list[dict]:
    """Return rows of a run that measures at every tenth step, with other numbers for each seed."""
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
    """Make a run folder with these metrics. Its flags are the algorithm's defaults and `config`."""
    folder.mkdir(parents=True, exist_ok=True)
    module = module_of(algorithm)
    flags = asdict(module.Args()) | {"algorithm": algorithm, "acted": module.ACTED, "ranks": 1}
    (folder / "config.json").write_text(json.dumps(flags | {"model": "tiny"} | config))
    (folder / "metrics.jsonl").write_text(as_lines(lines))
    return folder


def group_of(step: int, texts: list[str] = HOSTILE) -> dict:
    """Return a row of samples.jsonl, with a response for each text, which is also each of its two
    tokens."""
    responses = []
    for i, text in enumerate(texts):
        response = {"text": text, "given": "", "reward": float(i == 0), "finished": True}
        response |= {"advantage": 1.5 - 2.0 * (i > 0), "tokens": [text, text]}
        for name in ("logp", "old_logp", "rollout_logp", "entropy"):
            response[name] = [-0.5, -0.125]
        responses.append(response | {"ids": [3, 1], "weight": [0.25, -i / 8]})
    row = {"step": step, "minibatch": 1, "minibatches": 1, "group": 0, "rows": 4, "tokens": 8}
    return row | {"prompt": texts[0], "answer": texts[1], "responses": responses}


def with_samples(folder: Path, rows: list[dict], **config: object) -> Path:
    """Make a run folder with these rows of samples.jsonl."""
    a_run(folder, metrics_of(9), **config)
    (folder / "samples.jsonl").write_text(as_lines(rows))
    return folder

"""Write the responses of a run, token by token, from its samples.jsonl as one HTML page that works
offline.

    python -m tools.page RUN [OTHER] [--every N] [--out FILE]

RUN and OTHER are run folders with a samples.jsonl (`--sample_every`); the page shows two runs side
by side. It opens where held-out accuracy fell or rose most, and has the groups of each stored step:
prompt, responses, reward, Â, and every token. A token's colour is the factor on its ∇ log π in the
update that trained it, or another number: the ratio to π_old, the entropy, the gap between sampler
and trainer, or the KL to the reference.

The page's layout and program are in tools/page.html; tools.explorer also uses tools/look.*.
"""

import importlib
import json
import math
from dataclasses import asdict
from pathlib import Path

from common.cli import BadInput, in_one_line
from common.records.curves import ROUNDING
from common.records.files import read_lines, saved_config
from common.records.summary import ending_of, summary_of

from checks.files import MODULES
from tools import arguments
from tools.look import short, write

TEMPLATE = Path(__file__).with_suffix(".html")
MOST = 30  # steps on a page; if a run stores more, the page leaves out some in between
CURVES = "reward greedy entropy grad_norm response_len sampler_kl ess_ratio".split()
POINTS = 400  # most points of a curve


def flags_of(config: dict) -> str:
    """Write the run's flags that differ from its file's defaults, as on a command line."""
    if config["algorithm"] not in MODULES:
        return ""
    defaults = asdict(importlib.import_module(MODULES[config["algorithm"]]).Args())
    defaults = json.loads(json.dumps(defaults))  # tuples become lists, as in config.json
    words = []
    for name, value in config.items():
        if name == "run_dir" or defaults.get(name, value) in (value, "auto", ""):
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        else:
            words.append(f"--{name} {value}")
    return " ".join(words)


def curves_of(metrics: list[dict], more: list[str]) -> dict[str, list]:
    """Map those of CURVES and `more` that the run has to their points [step, value]."""
    thin = math.ceil(len(metrics) / POINTS)
    curves = {}
    for name in dict.fromkeys([*CURVES, *more]):
        known = [row for row in metrics if row.get(name) is not None]
        if name == "sampler_kl" and all(row[name] < ROUNDING for row in known):
            continue
        points = known if name == "greedy" else known[::thin]
        if points:
            curves[name] = [[row["step"], short(row[name], 4)] for row in points]
    return curves


def fewer_digits(name: str, value: float | None) -> float | None:
    """Round a token's number: a weight to three digits, others to four decimals."""
    if value is None:
        return None
    return short(value, 3) if name == "weight" else round(value, 4) + 0.0  # + 0.0: no -0.0


def shortened(row: dict) -> dict:
    """Return a row of samples.jsonl with only what the page shows."""
    responses = []
    for response in row["responses"]:
        kept = {name: value for name, value in response.items() if name not in ("ids", "text")}
        for name, values in kept.items():
            if name in ("weight", "entropy") or name.endswith("logp"):
                kept[name] = [fewer_digits(name, value) for value in values]
        responses.append(kept)
    return row | {"responses": responses}


def run_data(folder: Path, every: int) -> dict:
    """Collect what the page shows of a run: its first step, its last step and those divisible by
    `every`, but no more than MOST."""
    config, path = saved_config(folder), folder / "samples.jsonl"
    if not config:
        raise BadInput(f"{folder}: holds no run")
    if not path.is_file():
        raise BadInput(f"{folder}: has no samples.jsonl (a run of --sample_every 0 keeps none)")
    rows = read_lines(path)
    groups = [row for row in rows if "responses" in row]
    if not groups:
        raise BadInput(f"{path}: holds no responses yet")
    stored = sorted({row["step"] for row in groups})
    chosen = [step for step in stored if step % every == 0 or step in (stored[0], stored[-1])]
    chosen = {*chosen[:: math.ceil(len(chosen) / MOST)], chosen[-1]}
    metrics = read_lines(folder / "metrics.jsonl")
    evaluated = any("greedy" in row for row in metrics)
    return {
        "name": folder.resolve().name,
        "ending": ending_of(summary_of(metrics)) if evaluated else "",
        "algorithm": config["algorithm"],
        "flags": flags_of(config),
        "curves": curves_of(metrics, list(config["acted"])),
        "examples": [row for row in rows if "example" in row],
        "stored": len(stored),
        "rows": [shortened(row) for row in groups if row["step"] in chosen],
    }


def overview_beside(out: Path) -> dict:
    """Return a link back to the list of pages, if the page's folder has one, like docs/."""
    return {"overview": "index.html"} if (out.parent / "index.html").is_file() else {}


def main(runs: list[Path], out: Path, every: int = 1) -> None:
    """Write the page and print where it is."""
    if len(runs) > 2:
        raise BadInput(f"{len(runs)} runs: the page shows two")
    if every < 1:
        raise BadInput(f"--every {every}: must be 1 or more")
    write(TEMPLATE, {"runs": [run_data(run, every) for run in runs]} | overview_beside(out), out)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder, or two")
    parser.add_argument("--out", type=Path, help="the page to write (default: RUN/page.html)")
    steps = "show the first step, the last step and those divisible by N (default: all stored)"
    parser.add_argument("--every", type=int, default=1, metavar="N", help=steps)
    flags = parser.parse_args()
    try:
        main(flags.runs, flags.out or flags.runs[0] / "page.html", flags.every)
    except (BadInput, OSError) as error:
        parser.error(in_one_line(error))

"""A line for each arm and a band for its seeds, where a line for each run would be a tangle."""

import numpy as np
from common.curves import smooth

from labs import lab


def bands(axis: object, runs: list[dict], column: str, colour: str, **style: object) -> None:
    """The median of a column of runs over its steps, and the middle 80% of the seeds (of five:
    all), as far as all of them go. `width`: how many steps each run is averaged over first."""
    width = style.pop("width", 1)
    length = min(len(run[column]) for run in runs)
    steps = np.array(runs[0][f"{column}@"][:length])
    smoothed = [{column: smooth(run[column], width)[:length]} for run in runs]
    lab.line(axis, steps, smoothed, column, colour, **style)
    axis.set_xlabel("step")


def key(axis: object, colours: dict[str, str], x: float = 0.02, y: float = 0.95) -> None:
    """As `lab.key`, downwards from a place of one's own."""
    for place, (name, colour) in enumerate(colours.items()):
        lab.label(axis, x, y - 0.065 * place, name, colour, xycoords="axes fraction")

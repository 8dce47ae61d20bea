"""Shared parts of the pages of tools.page and tools.explorer: their look and keys (look.html,
look.js), how data are inserted, and where a page may be written."""

import json
from pathlib import Path

from common.cli import BadInput
from common.records import files


def short(value: float, digits: int) -> float:
    """The number with that many digits."""
    return float(f"{float(value):.{digits}g}")


def form(template: Path) -> str:
    """A page's form and program, with the shared parts and without data."""
    text = template.read_text("utf-8")
    for place, name in (("{{look}}\n", "look.html"), ("{{shared}}\n", "look.js")):
        text = text.replace(place, template.with_name(name).read_text("utf-8"))
    return text


def filled(template: Path, data: dict) -> str:
    """The whole page. Nothing in the data is read as HTML."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Inside <script> nothing is read as HTML but </script and <!--: no < is left
    return opening(template) + form(template).replace("{{data}}", text.replace("<", r"\u003c"))


def opening(template: Path) -> str:
    """The beginning of a page that this program wrote, and may overwrite."""
    return f"<!doctype html><!-- tools.{template.stem} -->"


def write(template: Path, data: dict, out: Path) -> None:
    """Write a page and print its path. BadInput if another program's file has that name."""
    if not out.parent.is_dir():
        raise BadInput(f"--out {out}: no folder {out.parent}")
    if out.is_dir() or out.exists() and not out.read_bytes().startswith(opening(template).encode()):
        raise BadInput(f"--out {out}: is another file: give another name")
    files.write(out, filled(template, data))
    print(out)

"""Shared parts of the pages of tools.page, tools.explorer and tools.side: their look and keys
(look.html, look.js), how data are inserted, and where a page may be written."""

import json
from pathlib import Path

from common.cli import BadInput
from common.records import files


def short(value: float, digits: int) -> float:
    """Round a number to `digits` significant digits."""
    return float(f"{float(value):.{digits}g}")


def form(template: Path) -> str:
    """Return a page's layout and program, with the shared parts but without data."""
    text = template.read_text("utf-8")
    for place, name in (("{{look}}\n", "look.html"), ("{{shared}}\n", "look.js")):
        text = text.replace(place, template.with_name(name).read_text("utf-8"))
    return text


def filled(template: Path, data: dict) -> str:
    """Return the whole page. Nothing in the data is read as HTML."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Inside <script> a browser reads only </script and <!-- as HTML, so we leave no <.
    return opening(template) + form(template).replace("{{data}}", text.replace("<", r"\u003c"))


def opening(template: Path) -> str:
    """Return the first line of a page that this program writes, and so may overwrite."""
    return f"<!doctype html><!-- tools.{template.stem} -->"


def write(template: Path, data: dict, out: Path) -> None:
    """Write a page and print its path. Raise BadInput if another program's file has that name."""
    if not out.parent.is_dir():
        raise BadInput(f"--out {out}: no folder {out.parent}")
    if out.is_dir() or out.exists() and not out.read_bytes().startswith(opening(template).encode()):
        raise BadInput(f"--out {out}: is another file: give another name")
    files.write(out, filled(template, data))
    print(out)

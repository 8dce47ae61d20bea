"""The algorithm files: their paths, their module names, and their base files."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIRST = "grpo"  # the base file of base files


def algorithms() -> list[Path]:
    """Return every algorithm file, the first base file first. An algorithm file is one that
    launches a `main` of its own."""
    files = [path for folder in (ROOT, ROOT / "variants") for path in sorted(folder.glob("*.py"))]
    own = [path for path in files if "launch(main, Args)" in path.read_text("utf-8")]
    return sorted(own, key=lambda path: (path.stem != FIRST, path.parent != ROOT, path.stem))


def base_of(path: Path, source: str | None = None) -> Path | None:
    """Return the base file of this file, or None for the first base file."""
    named = re.search(r"^Base file: (\w+)\.py", source or path.read_text("utf-8"), re.MULTILINE)
    if named:
        return next(
            p for p in (path.with_name(f"{named[1]}.py"), ROOT / f"{named[1]}.py") if p.exists()
        )
    return None if path.stem == FIRST else ROOT / f"{FIRST}.py"


PATHS = {path.stem: path for path in algorithms()}
# stem -> module: grpo, or variants.dapo
MODULES = {
    name: ".".join(path.relative_to(ROOT).with_suffix("").parts) for name, path in PATHS.items()
}
ALGORITHMS = tuple(PATHS)
NINE = tuple(name for name, path in PATHS.items() if path.parent == ROOT)
VARIANTS = tuple(name for name in ALGORITHMS if name not in NINE)

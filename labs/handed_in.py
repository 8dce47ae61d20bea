"""A file that was handed in: loading it without its `main`, and describing what it raised."""

import ast
import linecache
import sys
import textwrap
import traceback
from pathlib import Path
from types import ModuleType

from common.cli import in_one_line

from labs.blank import REQUIRED


def load(source: str, path: Path) -> ModuleType:
    """Load the file as a module, without `main` and the imports that only `main` needs, because
    loading all of transformers would take longer than grading."""
    tree = ast.parse(source, str(path))
    tests = [node for node in tree.body if isinstance(node, ast.If)]
    of_a_run = [node for node in tests if "__name__" in ast.unparse(node.test)]
    of_a_run += [node for node in tree.body if getattr(node, "name", "") == "main"]
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    of_a_run += [node for node in assigned if ast.unparse(node).startswith("main = ")]  # a variant
    tree.body = [node for node in tree.body if node not in of_a_run]
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {"*", "annotations", *REQUIRED}  # `annotations` comes from __future__
    for node in [*tree.body]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
            if used.isdisjoint(names):
                tree.body.remove(node)
    module = ModuleType("handed_in")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look for their module there
    linecache.cache[str(path)] = (len(source), None, source.splitlines(True), str(path))
    exec(compile(tree, str(path), "exec"), vars(module))
    return module


def in_words(error: BaseException, path: Path) -> str:
    """Describe an exception, with the line of the student's file that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if frame.filename == str(path)]
    if isinstance(error, SyntaxError):
        return f"line {error.lineno} is not Python: {error.msg}"
    if isinstance(error, NotImplementedError):
        return in_one_line(error)
    if isinstance(error, KeyError) and not lines:
        return f"{error} is missing from what measures returns"
    if isinstance(error, AssertionError) and frames[-1] not in lines:  # raised by the check itself
        rule = frames[-1].line.removeprefix("assert ")
        return " ".join(str(error).split()) or f"`{rule}` does not hold"
    place = f" at line {lines[-1].lineno}: {lines[-1].line}" if lines else ""
    message = textwrap.shorten(str(error), 200, placeholder=" ...")
    return f"{type(error).__name__}{place}" + (f" ({message})" if message else "")

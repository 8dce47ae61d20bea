"""Print the whole loop of a variant: `python -m variants dapo`."""

import importlib
import sys

for name in sys.argv[1:]:
    print(importlib.import_module(f"variants.{name}").main.source)

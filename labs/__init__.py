"""Failures and their repairs on a laptop, exercises, and a bug hunt: see labs/README.md.

Every lab is on the real files: it imports their `advantages` and `policy_loss`, or runs them by
their flags; none writes a loss of its own.
"""

import sys
from pathlib import Path

# Before the current folder, which `python -m` puts first: a grpo.py of one's own that lies there is
# graded, and never taken for the repository's.
sys.path.insert(0, str(Path(__file__).parent.parent))

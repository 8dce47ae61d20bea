"""Failures and their repairs on a laptop, exercises, and a bug hunt: see labs/README.md.

Every lab uses the real files: it imports their `advantages` and `policy_loss`, or runs them with
flags. No lab has a loss of its own.
"""

import sys
from pathlib import Path

# Put the repository before the current folder, which `python -m` puts first. A reader's own grpo.py
# in that folder is then graded, but never imported instead of the repository's.
sys.path.insert(0, str(Path(__file__).parent.parent))

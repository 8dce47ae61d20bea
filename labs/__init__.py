"""Failures and their repairs on a laptop, exercises, and a bug hunt: see labs/README.md.

Every lab is on the real files: it imports their `advantages` and `policy_loss`, or runs them by
their flags; none writes a loss of its own.
"""

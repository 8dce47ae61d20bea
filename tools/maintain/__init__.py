"""Programs for whoever carries this on: docs/common.md has a line for each."""

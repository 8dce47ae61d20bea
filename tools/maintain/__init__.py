"""Programs for whoever carries this on: docs/development.md has a line for each."""

"""Programs for maintainers: docs/development.md has a line for each."""

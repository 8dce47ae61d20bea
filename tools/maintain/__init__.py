"""Programs for maintainers: `marks` lists what the files change in grpo.py, `walk` and
`losses` write docs/walk.md and docs/losses.md."""

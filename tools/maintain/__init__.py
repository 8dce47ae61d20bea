"""Programs for maintainers: `marks` lists what the files change in grpo.py, `spread` copies a
change of grpo.py into all of them, `walk` and `losses` write docs/walk.md and docs/losses.md."""

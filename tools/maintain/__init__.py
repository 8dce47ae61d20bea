"""Programs for maintainers: `marks` lists what the files change in grpo.py, `spread` carries a
change of grpo.py into all of them, `walk` writes docs/walk.md from one real step, `bench` times a
step of grpo.py against TRL's."""

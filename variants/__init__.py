"""The neighbours of the nine, in the same form: `torchrun -m variants.dapo`, from the root."""

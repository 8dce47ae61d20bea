"""The tests; labs may use `checks`, and numbers computed elsewhere come in by `adapters`."""

"""One file for each command: `add` declares what it takes, `run` does it and returns the exit code.

Nothing here computes a cost: a command reads its options, asks the package, and says what came back.
"""

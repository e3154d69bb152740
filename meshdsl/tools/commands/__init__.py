"""One file per command: `add` declares its options, `run` runs it and returns the exit code.

Commands parse options, call the package and print the result; they compute nothing themselves.
"""

"""The cost of a layout: the ledger of a program, its memory, and its time on a machine."""

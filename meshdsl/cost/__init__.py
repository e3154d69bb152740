"""What a layout costs: the ledger of a program, its memory, its time on a machine, and the search for a better one."""

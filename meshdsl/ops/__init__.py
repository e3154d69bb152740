"""The operations: one record each, in the file of its family."""

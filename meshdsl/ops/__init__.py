"""The operations. Each has one `Op` record, in the module of its family."""

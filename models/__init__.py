"""Models written in the language; each module offers workloads for the command line."""

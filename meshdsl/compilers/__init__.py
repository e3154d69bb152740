"""Other compilers as witnesses: StableHLO, the TPU compiler, and measurements of this machine."""

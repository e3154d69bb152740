"""Independent checks of the cost model: StableHLO, the TPU compiler, and measurements of this machine."""

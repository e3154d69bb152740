"""Programs and system models that `benchmarks.ground_truth` compares with published measurements."""

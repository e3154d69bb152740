"""What `benchmarks.ground_truth` sets beside published measurements: programs, and models of the systems measured."""

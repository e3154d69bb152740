"""Published measurements beside the cost tool's predictions: python -m benchmarks.ground --data measurements.json

The file is a list of rows {id, group, model_config, hardware, parallelism, measured}. Prints JSON lines.

steps        step times of published training runs, by `Compiled.cost` on the packaged machines, with the coverage of
             their intervals, the rank correlation, and the loss from taking the layout that is predicted to be fastest
leave-out    the same, with the fitted figures of a machine refitted without a group of rows: --leave-out size, tp or
             source. A refit takes minutes the first time; --cache FILE stores what was traced
collectives  times of nccl-tests and similar tools, at 16 MB and more
"""

"""Pipeline parallelism: put microbatches in the order in which pipelines wait least, and predict the time of a step.

A strategy calls these functions with a graph and the trainer's `Pipeline`: `order`, `level` and `timing`.
"""

"""Pipeline parallelism: a simulator of 1F1B, and the order of microbatches."""

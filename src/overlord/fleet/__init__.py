"""The loader hosts of a run while it runs: profiling, sizing, scaling, shadows, and the loop that looks after them."""

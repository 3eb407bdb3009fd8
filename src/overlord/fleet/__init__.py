"""The loader hosts of a run while it runs: profiling, sizing, scaling, shadows, and their control loop."""

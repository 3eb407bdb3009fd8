"""Manages the loader hosts of a run: profiling, sizing, scaling, shadows, and their control loop."""

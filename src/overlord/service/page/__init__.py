"""The live page of a run: what a browser shows of it, and how that gets there."""

"""Decides which loader host reads which share of which source: before a run, during it, and after the loss of a host."""

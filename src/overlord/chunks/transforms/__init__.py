"""Transforms: functions over an Arrow table, run on each chunk of a source.

A transform is any function `f(table) -> table` or `f(table, context) -> table`. It must be deterministic:
randomness comes from `context.rng(row)`. It may drop rows or make many out of one; `outcome.py` says how lineage is kept. It
must treat rows independently of each other, since it may be run again on part of a table to find a bad row.
"""

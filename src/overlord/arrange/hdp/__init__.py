"""Hybrid data parallelism (HDP): dp x cp ranks as one pool, where long documents span as many ranks as they need.

A strategy calls `hdp.split(graph, capacity)`; `strategies.hdp` is the ready-made strategy.
"""

"""Hybrid data parallelism: documents over as many ranks as they need."""

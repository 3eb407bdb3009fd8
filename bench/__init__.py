"""Benchmarks: Overlord and its peers, each in a fresh process, interleaved, reported as ratios with their spread."""

"""Bounded stores of bytes that can be made again."""

"""Blocks of data: readers, transforms, chunks and collation."""

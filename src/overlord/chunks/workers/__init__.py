"""Worker processes for transforms."""

"""Which loader host reads which share of which source: before a run, during it, and when one is lost."""

"""Time travel: which documents made a step, in which steps a document was, and what it says."""

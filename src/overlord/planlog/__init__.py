"""The planner's log: records, an append-only log, and the segments it lies in."""

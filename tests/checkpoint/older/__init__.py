"""What an earlier release wrote: a state, a plan log, and the steps that its run went on with. See `job.py`."""

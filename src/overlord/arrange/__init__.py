"""Where the samples of a step go. Pure functions of facts."""

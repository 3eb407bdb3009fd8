"""Which samples make step n. Pure functions of facts, the mixture and the seed."""

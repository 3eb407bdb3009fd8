"""Steps that really run on a GPU: every virtual rank's microbatches, forward and backward, one after the other."""

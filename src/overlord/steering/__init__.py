"""What a run learns while it goes on: weights from losses, costs from times."""

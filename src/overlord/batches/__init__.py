"""From planned rows to the arrays that a rank receives."""

"""Where roles run: embedded in this process."""

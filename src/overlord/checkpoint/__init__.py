"""The saved state: progress, fingerprint, and the form in which both are handed out."""

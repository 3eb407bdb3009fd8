"""Sources made of files: storage, and one module per format."""

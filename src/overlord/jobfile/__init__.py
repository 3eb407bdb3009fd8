"""Job files: Python files, and YAML files whose keys are the fields of `Job`; words that change both; and printing."""

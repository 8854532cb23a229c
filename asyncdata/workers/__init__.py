"""Who runs the tokenize function: this process, worker processes, or actors."""

"""Looks at single rows of the order D: where they lie, what the tokenize function makes of them, what is trained."""

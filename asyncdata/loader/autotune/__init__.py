"""Finds the number of workers and how far to read ahead, from what the trainer waited for."""

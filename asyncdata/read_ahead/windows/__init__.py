"""The rows that are read and shuffled together, one kind for each way of reading."""

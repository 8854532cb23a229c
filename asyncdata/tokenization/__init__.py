"""What a worker runs: raw rows in, packed columns of tokens out."""

"""Sources of rows: their descriptions, and the blocks they are split into."""

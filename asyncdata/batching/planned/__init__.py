"""Plans the packs of a whole epoch from the lengths of all rows, before the first row is tokenized."""

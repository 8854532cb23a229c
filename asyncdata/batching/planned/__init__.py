"""Packs of a whole epoch, planned from the lengths of all rows before the first of them is tokenized."""

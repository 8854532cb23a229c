"""The token cache: samples that a tokenize function made once, kept for later epochs and other runs."""

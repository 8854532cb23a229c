"""Documents of tokens to the arrays of a batch, in numpy; torch tensors on request."""

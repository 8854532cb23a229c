"""The iterators of one epoch: samples, packs made online, planned packs."""

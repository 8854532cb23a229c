"""Peers: other libraries, whose behaviour ours has in a mode of its own; and records of what they deliver."""

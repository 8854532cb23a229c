"""What asyncdata is measured beside: each peer in a virtual environment of its own, run by a script of its own."""

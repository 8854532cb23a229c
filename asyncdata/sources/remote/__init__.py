"""Objects in stores (S3, GCS, Azure, http): addresses, listings, and pinned reads, many at a time.

A store is opened in the process that reads, and never before a fork: its library has threads that a fork does not copy.
"""

"""Where every row lies, for orders of single rows: built by workers, kept in files, removed when room is short."""

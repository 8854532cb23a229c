"""What a loader records of a run: the records, the file they are written to, and how the files of a run are read."""

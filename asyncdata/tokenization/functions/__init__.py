"""The tokenize functions that users choose from, one file each, and the settings they share."""

"""The contracts of training frameworks: their rows read, their samples built, their data sources replaced."""

"""The loaders of training frameworks, built by their own code, each in a process that is killed and starts again."""

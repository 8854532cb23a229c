"""Text to token ids: the tokenizer's own library, or a faster one that was proven to give the same ids."""

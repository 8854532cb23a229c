"""Pictures of chats: where they are, their sizes by their headers, and their pixels by a processor of transformers."""

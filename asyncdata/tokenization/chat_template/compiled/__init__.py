"""What a template makes of all chats of one shape, found once by running it on texts without content."""

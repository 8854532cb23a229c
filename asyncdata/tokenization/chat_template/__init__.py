"""Chats to text: the template in a sandbox, where the assistant speaks in it, and a compiled form for common shapes."""

"""Anthropic's Messages API, over the same chats. `routes` is a good place to start reading."""

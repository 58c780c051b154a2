"""A chat in a terminal, with any server that speaks OpenAI's API."""

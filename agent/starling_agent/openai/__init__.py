"""The OpenAI endpoint. `app` puts it together; `chat` and `completions` are good places to start reading."""

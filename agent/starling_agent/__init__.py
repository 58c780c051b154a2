"""The node agent: hosts the engine and its OpenAI endpoint."""

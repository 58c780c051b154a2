"""Splits what a model writes into content, reasoning and calls of tools, as it comes. `families` has the table of formats."""

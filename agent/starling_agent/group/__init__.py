"""Several nodes that serve one model: which nodes there are, and what runs on them."""

"""Several nodes that serve one model together: who is there, and what runs where."""

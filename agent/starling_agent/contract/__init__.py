"""What the operator and an agent say to each other. Imports neither torch nor a web framework: the operator's image has neither."""

"""Messages between the operator and agents. Imports neither torch nor a web framework: the operator's image has neither."""

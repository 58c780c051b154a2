"""One module a command: its flags, and what it starts. Heavy imports happen inside them."""

"""Changes of a group's size while it serves. Imports no torch."""

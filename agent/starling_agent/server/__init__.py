"""From arguments to a process that serves, and from a signal to its end."""

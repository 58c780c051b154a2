"""The HTTP server: sockets, connections, and its end after a signal."""

"""Communicators: the ranks that share one model exchange tensors through them."""

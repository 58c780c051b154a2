"""Triton kernels, each with the signature of its torch reference. They import triton: only what has chosen them imports them."""

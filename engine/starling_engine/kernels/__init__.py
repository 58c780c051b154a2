"""Triton kernels, each with the signature of its torch reference. They import triton, so only code that chose them imports them."""

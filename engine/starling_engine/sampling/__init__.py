"""Sampling, from logits to tokens: adjustments, filters, the draw, and log probabilities."""

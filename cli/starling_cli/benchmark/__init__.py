"""Measurements of `starling bench` and their reports."""

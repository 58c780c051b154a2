"""Executors: they carry plans to workers and results back."""

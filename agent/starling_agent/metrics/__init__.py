"""Prometheus metrics of one agent."""

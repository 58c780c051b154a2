"""Layers that every request passes before its route, and the errors of all routes."""

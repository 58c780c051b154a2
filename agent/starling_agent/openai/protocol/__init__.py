"""Requests as pydantic models, strict and closed to unknown fields, and answers as msgspec structs.

What a client may send that this release cannot honour is listed in `refused`; a field is honoured, refused by name, or one of
the few harmless ones that never change an answer.
"""

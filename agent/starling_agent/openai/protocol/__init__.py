"""Requests as pydantic models, strict and closed to unknown fields, and answers as msgspec structs.

Each field that clients may send is used, refused by name (see `refused`), or one of the few that never change an answer.
"""

"""Texts whose vectors and scores are compared with those of sentence-transformers."""

TEXTS = ["What does len() do?", "Join one or more path components intelligently.", "a"]
QUERY = "How many items has a list?"
DOCUMENTS = [
    "len(s): Return the length (the number of items) of an object.",
    "os.path.join(path, *paths): Join one or more path segments intelligently.",
    "The argument may be a sequence or a collection.",
    "Nor is it anybody's who only measures the time.",
]
INSTRUCTION = "Given a question, find the page of the manual"
CUT = 30
"""Tokens that a chat template and its tail fit in, and not each of the texts with them."""

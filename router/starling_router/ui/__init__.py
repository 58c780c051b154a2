"""The status page, /ui: what the router sees of its servers, and a chat with them."""

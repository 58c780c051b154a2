"""A store over the network as a tier: Mooncake Store (https://kvcache-ai.github.io/Mooncake), which a fleet of engines shares.

`tier` is what an engine calls. The store's library runs in a process of its own (`helper`), so that nothing it does, hanging
and crashing included, reaches the engine; `client` holds that process, and `watch` decides when to leave it alone. Nothing
is imported here: the operator takes `address` alone.
"""

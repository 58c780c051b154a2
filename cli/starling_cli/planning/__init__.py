"""What `starling plan` prints: the children of a manifest, the layout of its ranks, and what an edit would change."""

"""Output of `starling plan`: the children of a manifest, the layout of its ranks, and the effects of an edit."""

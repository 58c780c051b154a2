"""Client of agents' admin endpoints: for the operator, for `starling up`, and for nodes that call their leader."""

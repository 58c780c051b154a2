"""Connection to a cluster: a few calls of the official client behind one small class."""

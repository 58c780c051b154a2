"""Types of the API `serving.starling.dev`. Imports neither the engine nor anything that talks to a cluster."""

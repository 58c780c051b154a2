"""A real Kubernetes on one machine for the tests: an API server alone, or nodes in network namespaces."""

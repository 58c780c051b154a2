"""The decisions: what is seen in, what to do out. Imports no Kubernetes client and no clock; the time is part of what is seen."""

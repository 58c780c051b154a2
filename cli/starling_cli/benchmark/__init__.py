"""What `starling bench` measures, and how it is told."""

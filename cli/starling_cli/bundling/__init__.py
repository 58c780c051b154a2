"""Contents of `starling support-bundle`."""

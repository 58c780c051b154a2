"""What `starling support-bundle` gathers, and what it leaves out."""

"""What `starling check` looks at: each check is a function from what it reads to findings."""

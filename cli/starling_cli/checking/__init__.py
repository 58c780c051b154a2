"""Checks of `starling check`. Each is a function that reads something and yields findings."""

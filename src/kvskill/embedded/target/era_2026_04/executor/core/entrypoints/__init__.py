"""Ways in."""

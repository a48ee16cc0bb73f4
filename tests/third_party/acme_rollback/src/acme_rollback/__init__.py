"""A callback for leyden that goes back to before a loss spike."""

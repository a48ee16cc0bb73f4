"""A callback for leyden that clips gradients."""

"""A callback for leyden that ends runs which have diverged."""

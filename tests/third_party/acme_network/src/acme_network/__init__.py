"""A recurrent network for leyden."""

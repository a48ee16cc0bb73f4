"""For leyden: text from tables, and an objective with smoothed labels."""

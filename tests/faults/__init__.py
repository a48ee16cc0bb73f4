"""The fault kit: faults injected into small runs, and how well they are diagnosed."""

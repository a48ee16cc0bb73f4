"""Files that are there as a whole or not at all, that several processes share, that are pictures."""

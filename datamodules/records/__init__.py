"""Records for fine-tuning: read from files, encoded once, stored, and dealt out as rows."""

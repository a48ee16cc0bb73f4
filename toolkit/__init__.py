"""What several callbacks share: trial steps, snapshots of training, limits of memory, outliers of a window."""

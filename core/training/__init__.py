"""What training is made of: sums over tokens and ranks, schedules, snapshots, trial steps, shapes of batches."""

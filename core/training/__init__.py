"""What training is made of: sums over tokens and ranks, schedules, shapes of batches, shards."""

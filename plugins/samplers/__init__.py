"""What samples the answers of rollouts in place of the network in training."""

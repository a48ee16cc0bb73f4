"""What decoder families are made of: attention, MLP, norms, positions, blocks, and the network around them."""

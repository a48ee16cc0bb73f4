"""What several techniques share: trial steps, snapshots of training, text generation, pictures, files of other programs."""

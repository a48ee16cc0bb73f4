"""What is between text and batches: contracts of stages, prepared folders here and elsewhere, loaders that know their place."""

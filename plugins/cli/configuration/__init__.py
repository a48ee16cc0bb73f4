"""From YAML files and arguments to objects that are checked, and what is said of mistakes in them."""

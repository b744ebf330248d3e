"""One module for each group of paths, and the schema over all of them."""

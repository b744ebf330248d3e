"""What a model takes of a device, and how many blocks fit beside it."""

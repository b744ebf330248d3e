"""Models: a Hugging Face folder becomes weights on a device, and a plan becomes tokens."""

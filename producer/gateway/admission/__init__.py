"""API keys by digest, what a key may do, and its limits in Redis."""

"""KV blocks: pool, free list, prefix chain, host memory for swap, who holds what, a map of it."""

"""A plan to tokens: the runner, its inputs and results, the KV cache, CUDA graphs."""

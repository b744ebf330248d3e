"""The decoder and what a model family changes in it; models that transformers computes."""

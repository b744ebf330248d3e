"""Logits to tokens: edits, masks of structured output, ranking, draws, logprobs. Uses torch."""

"""Text around token ids: tokenizer, chat template, detokenizer, stop strings."""

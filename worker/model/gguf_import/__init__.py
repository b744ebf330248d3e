"""GGUF files to Hugging Face folders."""

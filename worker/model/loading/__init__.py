"""A folder or hub id to weights on a device: safetensors, quantization, tokenizer, adapters."""

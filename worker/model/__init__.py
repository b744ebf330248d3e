"""Models: a Hugging Face folder becomes weights on a device, and a plan becomes tokens.

Imported by the rest of `worker` and by the command line; takes plans and options from
`worker.engine` (which takes a vocabulary and a tokenizer's files from here), tensors' operations
from `kernels`.

- `architecture`  one decoder, the table of what families change, and transformers' models
- `loading`       safetensors, quantization, tokenizer and adapters, from a folder or the hub
- `gguf_import`   GGUF files to Hugging Face folders
- `running`       runner, step inputs and results, KV cache, CUDA graphs
- `ranks`         tensor parallel
- `sizing`        memory: what a model takes, how many blocks fit
"""

"""What the kernels and the engine reach on a GPU; `run.sh` is the way in."""

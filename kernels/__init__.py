"""Operations on tensors, one per file: a plain reference, a form fast on the CPU, a Triton form.

Imports torch, triton (optional) and numpy only; `worker.engine` and `worker.model` may import
from here. `docs/kernels.md` says which form runs where and how each is proven.
"""

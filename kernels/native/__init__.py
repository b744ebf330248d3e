"""C++ kernels for the CPU, compiled on the machine that runs them and called through ctypes.

`library` loads them (`load_native`), `mode` says whether, `compiler` builds them; every `*.cpp`
here is part of the one shared library. Sources know neither torch nor Python: they take addresses
and numbers.

- `export.h`   makes a function callable from Python, with its signature
- `simd.h`     vectors of floats as wide as the machine's, float32 / bfloat16 / float16 in memory
- `recording`  work whose native calls are made once and then repeated without Python
- `threads.h`  work split over the threads of torch's own OpenMP pool

To add a kernel: write `void inferq_NAME(...)` in a `.cpp` file, `INFERQ_EXPORT(inferq_NAME)` below
it, and call `load_native().function("inferq_NAME", "pplf")(...)`. The torch form stays beside it:
where there is no compiler, `load_native()` is None.
"""

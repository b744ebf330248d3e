"""The pipe between a worker's two processes: the I/O side, and the engine that never waits for it.

Imported by `worker.service`, `worker.jobs`, `worker.insight` and `worker.llm`; `engine_process` is
a program of its own, which loads the model.

- `engine_client`   the I/O side's handle on the engine process
- `engine_process`  the engine's own process
- `engine_output`   what steps brought to one output of a request
- `frames`, `frame_pipe`  what passes between them, and how
- `books`           what steps came to, in numbers
"""

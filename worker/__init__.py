"""The worker: pulls jobs whose KV pages fit, runs them in one engine, publishes their tokens.

`command` starts a `service`, which alone knows both sides: `queue` (claim, publish, leases; no
torch) and the engine behind `engine_client`, in a process of its own (`engine_process`). `llm` is
the engine without a queue. Imported by the command line and, for `LLM`, by the top package.

- `settings`        every setting of a worker
- `probes`          what a worker answers on its health port; `metrics` made of its `books`
- `plan`            how many blocks a GPU will hold, before there is one
- `diagnosis`       what it would find on this machine, as `facts`, for `inferq doctor`
- `reports`         heartbeats; `snapshots` what the blocks hold, while somebody watches
- `dispatch`        jobs to engine requests (`preparation`), and what comes back to events
- `job_lines`, `job_trace`  what is told of a job on its way, in log lines and in spans
- `generation`, `outputs`, `engine_output`  the text of one job as it grows
- `frames`, `frame_pipe`  what passes between the two processes
- `factory`         loads a model and builds the engine around it
- `engine`          scheduler, blocks, sampler: knows nothing of Redis
- `model`           models, loader, runner: imports no settings
"""

"""The worker: pulls jobs whose KV pages fit, runs them in one engine, publishes their tokens.

`command` starts a `service`, which alone knows both sides: `queue` (claim, publish, leases; no
torch) and the engine behind the `pipe`, in a process of its own. `llm` is the engine without a
queue. Imported by the command line and, for `LLM`, by the top package.

- `settings`  every setting of a worker
- `factory`   loads a model and builds the engine around it
- `plan`      how many blocks a GPU will hold, before there is one
- `queue`     claiming, publishing, leases
- `jobs`      a claimed job's way through the worker
- `pipe`      what passes between the two processes
- `engine`    scheduler, blocks, sampler: knows nothing of Redis
- `model`     models, loader, runner: imports no settings
- `insight`   what it tells of itself: probes, metrics, heartbeats, block maps
"""

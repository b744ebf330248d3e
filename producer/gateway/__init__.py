"""The OpenAI-shaped HTTP front: a producer that holds no model and no state of its own.

Needs the extra `gateway` (fastapi, uvicorn, pydantic, structlog, prometheus_client). Imports the
SDK, the protocol and `inferq.runtime`; imported by the command line only, so that the SDK stays
light.

- `command`, `server`  `inferq gateway`: flags to a served application, and its end
- `app`            the application: routes, what lies around them, errors
- `gateway`        what every route uses: clients, directory, keys, limits
- `settings`       every setting
- `directory`, `drain_rate`  which queue serves a model, and how fast queues drain
- `in_flight`      what this process is busy with, and how it ends
- `errors`         every error in OpenAI's shape
- `middleware`     request ids, log lines, keys, the last resort
- `metrics`        what is counted; `measuring` counts it, under `route_names`
- `routes`         one module for each group of paths; `static` the pages at `/` and `/status`
- `status`         queues over the last minutes, workers and their blocks
- `admission`      API keys, what a key may do, its limits in Redis
- `requests`       bodies and headers to jobs
- `answers`        jobs' events to responses
- `tools`          what a model may call
"""

"""The OpenAI-shaped HTTP front: a producer that holds no model and no state of its own.

Needs the extra `gateway` (fastapi, uvicorn, pydantic, structlog). Imports the SDK, the protocol and
`inferq.runtime`; imported by the command line only, so that the SDK stays light.

- `command`, `server`  `inferq gateway`: flags to a served application, and its end
- `app`            the application: routes, what lies around them, errors
- `gateway`        what every route uses: clients, directory, keys, limits
- `settings`       every setting
- `directory`      which queue serves a model, and how fast queues drain
- `keys`, `access` API keys by digest, and what a key may do
- `limits`         requests, tokens and concurrency of a key, in Redis (`lua/`)
- `in_flight`      what this process is busy with, and how it ends
- `body`           request bodies: bounded, parsed, checked
- `errors`         every error in OpenAI's shape
- `middleware`     request ids, log lines, keys, the last resort
- `completions`, `chat`, `streams`, `tokenization`, `models`, `health`, `refused`, `page`  routes
- `schemas`        what bodies may hold; `sampling`, `prompts`, `conversation` what it becomes;
                   `delivery` what headers ask for besides
- `submission`, `following`, `responding`  jobs for all prompts or none, their events, the answer
- `note`, `choices`, `chunks`, `event_writer`, `answer`, `logprob_shapes`  a response as a pure
                   function of its jobs' notes and events; `sse` sends it
- `forms`          the form that an answer must have
- `tools`, `tool_choice`, `tool_grammars`  what a model may call, and the form that makes it so
- `tool_parsers`, `tool_text`, `tool_deltas`  streamed text to content and calls
- `openapi`, `answer_shapes`  the schema and its page
"""

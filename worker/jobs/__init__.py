"""A claimed job's way through the worker: decoded, tokenized, generated, made text, published.

Imported by `worker.service` and, for what is the same without a queue, by `worker.llm`; books and
log lines also by `worker.insight`. Imports the protocol, `inferq.runtime`, `worker.queue`,
`worker.pipe` and, for text and requests, `worker.engine`.

- `dispatch`, `preparation`  jobs to engine requests, and what comes back to events
- `tokenization`   jobs that ask for the tokens of a prompt alone
- `generation`, `outputs`  the text of one job as it grows
- `event_size`     what can be too large for an event
- `job_lines`, `job_trace`  its log lines and spans
- `books`          what jobs came to, in numbers
"""

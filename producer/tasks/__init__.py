"""`inferq tasks`: what happens around generation, performed by RQ on a small CPU pod.

May be imported by the command line only; imports the SDK with its batches,
`inferq.protocol` and `inferq.runtime`, RQ and httpcore (extra `tasks`).

- `command`        the process: flags, signals, `--burst`; `settings`
- `conductor`      the loop: moves ended jobs out of the queues' outboxes, and gives out tasks
- `workers`        the processes that perform tasks
- `counts`, `metrics`  what was done, over all processes, and who is told
- `duties`         the tasks there are: deliver webhooks, sweep, promote, trim
- `batches`        those of batches: run them, remove what is too old
- `safe_rq`        RQ, bound to JSON and to these tasks; `rq_connection` its connection
- `deliveries`     the state of each webhook delivery (`lua/`)
- `outbox`         an ended job to its delivery
- `sending`        one signed POST; `signing` the secrets, `addresses` where it may go
"""

"""The queue side of a worker: claiming by free blocks, publishing, leases. Knows nothing of torch.

May be imported by `worker.service`, `worker.jobs` and `worker.insight`; imports the protocol, redis
and `inferq.runtime.histogram`.

- `running`    the jobs this worker holds, what each generated, and the KV tokens they reserve
- `claimer`    pulls jobs while their pages fit, and sleeps until there is something to pull
- `publisher`  sends what accumulated since the last flush, many jobs in one call
- `lease`      renews leases while the engine makes progress; enforces deadlines
- `outage`     what the log says while calls fail
- `books`      what publishing and leases came to, in numbers
"""

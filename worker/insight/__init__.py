"""What a worker tells of itself: probes, metrics, heartbeats, block maps, and facts for the doctor.

Imported by `worker.service` and, for `facts` and `diagnosis`, by the command line; imports the
worker's other parts.

- `probes`     what it answers on its health port
- `books`, `metrics`  its figures, under the names of docs/metrics.md
- `reports`    heartbeats to the queue, and what the answer asks
- `snapshots`  what the engine's blocks hold, while somebody looks
- `facts`, `diagnosis`  what it would find on this machine
"""

"""What the status page shows: queues over the last minutes, workers, and their blocks.

Used by the gateway's routes only.
"""

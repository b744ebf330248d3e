"""The engine: block pool, scheduler and step loop over token ids, and the text around them.

Reads from `engine.py` down: `Engine.step` asks the scheduler for a plan, the runner for its tokens.
Imported by `worker` (service, offline `LLM`) and, for the plan and the options, by `worker.model`;
knows nothing of Redis, and `engine.py`, `scheduler.py` and `block_pool.py` nothing of torch.
"""

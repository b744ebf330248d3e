"""The engine: block pool, scheduler and step loop over token ids, and the text around them.

Reads from `engine.py` down: `Engine.step` asks the scheduler for a plan, the runner for its
results, and the collector for what they mean. Imported by `worker` (service, offline `LLM`) and,
for the plan and the options, by `worker.model`; knows nothing of Redis. No torch but in `sampling`.

- `engine`, `collector`, `flight`  a step: planned, computed, and told; two in flight at once
- `config`, `stats`, `runner_errors`  options, the engine's books, what a runner may raise
- `requests`    sequences, groups, beams, and the checks before them
- `blocks`      KV blocks: pool, prefix chain, swap, residency
- `scheduling`  admission, budgets, preemption, the plan
- `sampling`    logits to tokens: edits, structured output, draws, logprobs
- `text`        tokenizer, chat template, detokenizer, stop strings
"""

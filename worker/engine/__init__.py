"""The engine: block pool, scheduler and step loop over token ids, and the text around them.

Reads from `engine.py` down: `Engine.step` asks the scheduler for a plan, the runner for its
results, and the collector for what they mean. Imported by `worker` (service, offline `LLM`) and,
for the plan and the options, by `worker.model`; knows nothing of Redis. No torch but in `sampler`,
`ranking`, `logprobs` and `logits_edits`.

- requests     `sequence`, `group`, `beam`, `ends`, `request`, `request_checks`, `token_parameters`
- blocks       `block_pool`, `free_list`, `prefix_chain`, `host_pool`, `residency`
- scheduling   `scheduler`, `prompt_limit`, `sequence_queue`, `admission`, `preemption`, `draft`,
               `plan`
- results      `engine`, `collector`, `token_output`, `stats`, `runner_errors`, `config`
- sampling     `sampler`, `ranking`, `logprobs`, `logits_editor`, `logits_edits`, `token_counts`,
               `bad_words`, `structured_output`, `form_tokens`, `form_masks`
- text         `tokenizer`, `chat_template`, `detokenizer`, `stop`, `output`
"""

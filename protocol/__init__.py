"""The contract between producers and workers: messages, key names, errors, atomic scripts.

May be imported by anyone; imports the standard library, msgpack and redis (`scripts`, `connection`)
only: never torch, transformers or settings, so that every client can afford it.

- `errors`    the exception tree and the typed reasons that travel in events
- `params`    `SamplingParams`, checked where it is made
- `keys`      every Redis key name, once
- `messages`  the job and event messages, with bounded decoding; `prompts` what a job asks about
- `prompt_inputs`  prompts of the plain maps and lists that callers give
- `trace_context`  in whose trace a job was submitted
- `json_values`  JSON inside messages, bounded
- `output_log`  the outputs of one job as they grow, and the events made of them
- `wire`      msgpack maps, read with every type checked
- `digest`    what tells whether two submissions ask for the same thing
- `replies`   what the scripts are asked and answer
- `scripts`   one `.lua` file per atomic operation, loaded and called by name
- `snapshots`  what a worker's blocks hold; `watching` who looks, and how snapshots pass
- `script_call`  one call of a script, by its digest or whole
- `connection`  redis's errors as ours; `task_ends` how tasks that wait for it are ended
"""

-- Replace the bounds of a running job's size by what the worker counted.
--
-- KEYS   as in prelude.lua
-- ARGV   1 worker   2 job id   3 epoch   4 prompt tokens   5 token budget
-- Reply  1 if the job is this worker's, else 0 and nothing is written
-- O(1).

local worker, id, epoch = ARGV[1], ARGV[2], ARGV[3]
local prompt, budget = tonumber(ARGV[4]), tonumber(ARGV[5])
proceed_when_memory_is_full()

local job = read_job(id)
if not job or job.state ~= 'running' or job.owner ~= worker or job.epoch ~= tonumber(epoch) then
  return 0
end
add('prompt_tokens', prompt - job.prompt)
add('budget_tokens', budget - math.max(job.budget, 0))
redis.call('HSET', job_key(id), 'prompt', prompt, 'budget', budget, 'cost', prompt + budget,
  'exact', 1, 'sized', 1)
return 1

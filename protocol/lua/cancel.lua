-- End a job because its producer asks for it: at once if no worker has it, else by a mark.
--
-- KEYS   as in prelude.lua
-- ARGV   1 job id   2 retention in ms
-- Reply  `cancelled` (it has ended so), `requested` (its worker will end it), `finished`, `unknown`
-- O(log n). The entry of a queued job stays in its lane, as nothing, until a claim comes to it.

proceed_when_memory_is_full()

local job = read_job(ARGV[1])
if not job then return 'unknown' end
if job.state == 'done' then
  local reason = redis.call('HGET', job_key(job.id), 'finish')
  return reason == 'cancelled' and 'cancelled' or 'finished'
end
if is_held(job) then
  redis.call('HSET', job_key(job.id), 'cancel', 1)
  return 'requested'
end
finish(job, 'cancelled', tonumber(ARGV[2]))
return 'cancelled'

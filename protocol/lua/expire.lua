-- End a job whose deadline has passed and that no worker has; anyone who waits for it may ask.
--
-- KEYS   as in prelude.lua
-- ARGV   1 job id   2 retention in ms
-- Reply  {`expired` (it has ended so) | `running` (its worker will end it) | `waiting` | `finished`
--        | `unknown`, ms to the deadline (-1: none)}
-- O(log n).

proceed_when_memory_is_full()

local job = read_job(ARGV[1])
if not job then return { 'unknown', -1 } end
if job.state == 'done' then
  local reason = redis.call('HGET', job_key(job.id), 'finish')
  return { reason == 'expired' and 'expired' or 'finished', -1 }
end
local left = job.deadline > 0 and math.max(job.deadline - NOW, 0) or -1
if is_held(job) then return { 'running', left } end
if not is_expired(job) then return { 'waiting', left } end
finish(job, 'expired', tonumber(ARGV[2]))
return { 'expired', 0 }

-- Hand jobs back at their published offset: the next claim may take them, no crash is counted.
--
-- KEYS   as in prelude.lua
-- ARGV   1 worker   then for each job: id, epoch, exact cost in tokens ('' : as it was)
-- Reply  how many of them were this worker's
-- O(log n) for each job.

local worker = ARGV[1]
proceed_when_memory_is_full()

local released = 0
for i = 2, #ARGV, 3 do
  local job = read_job(ARGV[i])
  if job and job.state == 'running' and job.owner == worker and job.epoch == tonumber(ARGV[i + 1])
  then
    released = released + 1
    move(job, 'released')
    redis.call('HSET', job_key(job.id), 'owner', '', 'handoffs', job.handoffs + 1)
    if ARGV[i + 2] ~= '' then
      redis.call('HSET', job_key(job.id), 'cost', ARGV[i + 2], 'sized', 1)
    end
    redis.call('ZADD', LEASES, GIVEN_BACK, job.id)
    if job.cancel then finish(job, 'cancelled', job.retention) end
  end
end
return released

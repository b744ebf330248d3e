-- Hand back jobs that this worker was given in a reply that it never saw, or lost with its engine.
--
-- KEYS   as in prelude.lua
-- ARGV   1 worker   2 crashed (1: whoever ran them is gone, which counts as a crash of each)
--        then the ids of the jobs that it has
-- Reply  how many were handed back
-- O(n) in the worker's pending entries; reads their payloads only if there are more of them than
-- jobs known. No claim of the same worker may be under way.

local worker, crashed = ARGV[1], ARGV[2] == '1'
local MAX_PENDING = 1000
proceed_when_memory_is_full()

local known = {}
for i = 3, #ARGV do known[ARGV[i]] = true end

local pending, total = {}, 0
for _, lane in ipairs(LANES) do
  local entries = redis.pcall('XPENDING', STREAMS[lane], GROUP, '-', '+', MAX_PENDING, worker)
  pending[lane] = entries.err and {} or entries
  total = total + #pending[lane]
end
if total <= #ARGV - 2 then return 0 end

local returned = 0
for _, lane in ipairs(LANES) do
  for _, item in ipairs(pending[lane]) do
    local entry = redis.call('XRANGE', STREAMS[lane], item[1], item[1])[1]
    local job = entry and read_job(field(entry[2], 'id') or '')
    if job and job.state == 'running' and job.owner == worker and not known[job.id] then
      if job.cancel then
        finish(job, 'cancelled', job.retention)
      elseif crashed then
        redis.call('HSET', job_key(job.id), 'owner', '') -- a publish under way shall not renew it
        redis.call('ZADD', LEASES, LEFT, job.id)
      else
        move(job, 'released')
        redis.call('HSET', job_key(job.id), 'owner', '', 'handoffs', job.handoffs + 1)
        redis.call('ZADD', LEASES, GIVEN_BACK, job.id)
      end
      returned = returned + 1
    end
  end
end
return returned

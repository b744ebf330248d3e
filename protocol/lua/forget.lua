-- Let go of the records, the events and the idempotency keys of jobs that have ended, before their
-- time.
--
-- KEYS   as in prelude.lua
-- ARGV   1… job ids
-- Reply  how many were let go
-- O(1) for each. Nothing is touched of a job that has not ended: its worker has yet to publish.

proceed_when_memory_is_full()

-- Deletes at once, by a right that producers have.
local function let_go(key) redis.call('PEXPIRE', key, 0) end

local number = 0
for _, id in ipairs(ARGV) do
  local job = read_job(id)
  if job and job.state == 'done' then
    if job.idem then
      local key = PREFIX .. 'idem:' .. job.idem
      local holder = string.match(redis.call('GET', key) or '', '^(%S+) ')
      if holder == id then let_go(key) end -- else it is a later job's
    end
    let_go(job_key(id))
    let_go(out_key(id))
    number = number + 1
  end
end
return number

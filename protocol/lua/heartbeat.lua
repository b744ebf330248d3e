-- Renew the leases of jobs that have no new events.
--
-- KEYS   as in prelude.lua
-- ARGV   1 worker   2 lease in ms   3 retention in ms   then for each job: id, epoch
-- Reply  for each job {`ok` | `stale`, tokens published, cancel (1: a producer asks to end it)}
-- O(log n) for each job.

local worker, lease_ms, retention_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
proceed_when_memory_is_full()
note_activity(lease_ms)

local replies = {}
for i = 4, #ARGV, 2 do
  local id, epoch = ARGV[i], ARGV[i + 1]
  local v = redis.call('HMGET', job_key(id), 'state', 'owner', 'epoch', 'offset', 'cancel',
    'retention')
  local held = v[1] == 'running' and v[2] == worker and v[3] == epoch
  if held then
    redis.call('ZADD', LEASES, NOW + lease_ms, id)
    keep_events(id, tonumber(v[6]), retention_ms, lease_ms)
  end
  replies[#replies + 1] = { held and 'ok' or 'stale', tonumber(v[4] or 0), tonumber(v[5] or 0) }
end
return replies

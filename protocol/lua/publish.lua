-- Append events to many jobs' streams, renew their leases, and end those that are through.
--
-- KEYS   as in prelude.lua
-- ARGV   1 worker   2 lease in ms   3 retention in ms   4 msgpack list of items, each
--        [job id, epoch, tokens published before these events, finish reason ('' : goes on),
--        [[tokens published after this event, event], ...]]
-- Reply  msgpack list of, for each item, [status, tokens published, cancel (1: a producer asks to
--        end it)]; status is
--        `ok`      appended; also when this worker's epoch had ended the job already (a retry)
--        `gap`     nothing appended: the server has another number of tokens; resend from there
--        `stale`   nothing appended: the job is not this worker's (any more)
-- O(1) for each event, O(log n) for each lease. An item is done wholly or not at all.

local worker, lease_ms, retention_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
proceed_when_memory_is_full()
note_activity(lease_ms)

-- Returns whether the stream took them: it refuses ids that do not grow, all or none of these.
local function append(id, events, is_end)
  local out = out_key(id)
  for i, event in ipairs(events) do
    local entry = string.format('%d-%d', event[1], is_end and i == #events and 1 or 0)
    local added = redis.pcall('XADD', out, entry, 'e', event[2])
    if type(added) == 'table' and added.err then return false end
  end
  return true
end

local function publish(id, epoch, first, reason, events)
  local v = redis.call('HMGET', job_key(id), 'state', 'owner', 'epoch', 'offset', 'cancel',
    'retention')
  local offset, cancel = tonumber(v[4] or 0), tonumber(v[5] or 0)
  if v[2] ~= worker or tonumber(v[3]) ~= epoch then return { 'stale', offset, cancel } end
  if v[1] == 'done' then return { 'ok', offset, 0 } end
  if v[1] ~= 'running' then return { 'stale', offset, cancel } end
  redis.call('ZADD', LEASES, NOW + lease_ms, id)
  if first ~= offset then return { 'gap', offset, cancel } end
  if not append(id, events, reason ~= '') then return { 'stale', offset, cancel } end
  keep_events(id, tonumber(v[6]), retention_ms, lease_ms)
  local total = #events > 0 and events[#events][1] or offset
  if total ~= offset then redis.call('HSET', job_key(id), 'offset', total) end
  if reason ~= '' then settle(read_job(id), reason, retention_ms, worker) end
  return { 'ok', total, cancel }
end

local replies = {}
for i, item in ipairs(cmsgpack.unpack(ARGV[4])) do
  replies[i] = publish(unpack(item, 1, 5))
end
return cmsgpack.pack(replies)

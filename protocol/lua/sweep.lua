-- Tidy up behind workers that are gone, and mend what a damaged server lost.
--
-- KEYS   as in prelude.lua
-- ARGV   1 ms without a heartbeat after which a worker is gone   2 most pending entries looked at
-- Reply  {workers removed, consumers removed, jobs put back, entries removed}
-- O(workers + consumers), plus the payloads of at most ARGV[2] entries for each lane, of 16 MiB and
-- one more, read only while pending entries and leases differ in number; a cursor kept in `load`
-- goes on from call to call.
--
-- A consumer is deleted only with nothing pending: deleting it would lose what it has.

local gone_ms, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
proceed_when_memory_is_full()

local alive, known = {}, redis.call('HGETALL', WORKERS)
for i = 1, #known, 2 do
  local ok, info = pcall(cmsgpack.unpack, known[i + 1])
  alive[known[i]] = ok and type(info) == 'table' and NOW - (tonumber(info.t) or 0) < gone_ms
end

local pending_of, pending_total, consumers_removed = {}, 0, 0
for _, lane in ipairs(LANES) do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', STREAMS[lane], GROUP)
  for _, consumer in ipairs(consumers.err and {} or consumers) do
    local name, pending = field(consumer, 'name'), field(consumer, 'pending')
    pending_of[name] = (pending_of[name] or 0) + pending
    pending_total = pending_total + pending
    if pending == 0 and not alive[name] and field(consumer, 'idle') >= gone_ms then
      redis.call('XGROUP', 'DELCONSUMER', STREAMS[lane], GROUP, name)
      consumers_removed = consumers_removed + 1
    end
  end
end

local workers_removed = 0
for name, lives in pairs(alive) do
  if not lives and (pending_of[name] or 0) == 0 then
    redis.call('HDEL', WORKERS, name)
    workers_removed = workers_removed + 1
  end
end

local put_back, entries_removed = 0, 0
local bytes = 0 -- of payloads read in the lane under way
local function mend(lane, entry)
  local found = redis.call('XRANGE', STREAMS[lane], entry, entry)[1]
  local job = found and read_job(field(found[2], 'id') or '')
  bytes = bytes + #(found and field(found[2], 'job') or '')
  if not job or job.state == 'done' or not is_entry_of(job, lane, entry) then
    drop_entry(lane, entry)
    entries_removed = entries_removed + 1
  elseif not redis.call('ZSCORE', LEASES, job.id) then
    if job.state ~= 'running' then move(job, 'released') end
    redis.call('ZADD', LEASES, job.state == 'running' and NOW or 0, job.id)
    put_back = put_back + 1
  end
end

local function mend_lane(lane)
  local cursor = redis.call('HGET', LOAD, 'sweep:' .. lane) or '-'
  local entries = redis.pcall('XPENDING', STREAMS[lane], GROUP, cursor, '+', limit)
  if entries.err then return end
  bytes = 0
  for i, item in ipairs(entries) do
    mend(lane, item[1])
    if i == limit or bytes >= MAX_READ_BYTES then
      redis.call('HSET', LOAD, 'sweep:' .. lane, '(' .. item[1])
      return
    end
  end
  redis.call('HDEL', LOAD, 'sweep:' .. lane)
end

if pending_total ~= redis.call('ZCARD', LEASES) then
  for _, lane in ipairs(LANES) do mend_lane(lane) end
end

local delayed, leases = redis.call('ZCARD', DELAYED), redis.call('ZCARD', LEASES)
redis.call('HSET', LOAD, 'delayed', delayed,
  'running', redis.call('ZCOUNT', LEASES, '(0', '+inf'))
local entries = 0
for _, lane in ipairs(LANES) do entries = entries + redis.call('XLEN', STREAMS[lane]) end
if delayed + leases + entries == 0 then
  redis.call('HSET', LOAD, 'queued', 0, 'prompt_tokens', 0, 'budget_tokens', 0)
end
return { workers_removed, consumers_removed, put_back, entries_removed }

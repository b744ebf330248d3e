-- Local functions that stand before every operation of this folder.
--
-- KEYS   1 load   2 leases   3 delayed   4 dead   5 workers
--        6 jobs:high   7 jobs:normal   8 jobs:low
--        Keys of single jobs and workers are built from the prefix of these; its hash tag puts all
--        of them in one Cluster slot.
-- Times  milliseconds by the server's clock, the only one.

local LOAD, LEASES, DELAYED, DEAD, WORKERS = unpack(KEYS, 1, 5)
local LANES = { 'high', 'normal', 'low' }
local STREAMS = { high = KEYS[6], normal = KEYS[7], low = KEYS[8] }
local PREFIX = string.sub(LOAD, 1, -#'load' - 1)
local OUTBOX = PREFIX .. 'outbox'
local GROUP = 'workers'
-- Dead letters beyond this many push out the oldest; each job got its terminal event anyway.
local MAX_DEAD_LETTERS = 10000
local MAX_DEAD_PAYLOAD = 65536
-- Delayed jobs that one call moves into their lanes.
local MAX_PROMOTED = 128
-- Bytes of payloads at which a call that reads or moves many of them stops and leaves the rest to
-- the next: the server does nothing else meanwhile, which so takes some 20 ms.
local MAX_READ_BYTES = 16777216

local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local NOW = clock()

local function job_key(id) return PREFIX .. 'job:' .. id end
local function out_key(id) return PREFIX .. 'out:' .. id end
local function drain_key(worker) return PREFIX .. 'drain:' .. worker end

local function is_job_id(id)
  local unique = string.match(id, '^([0-9a-f]+)%-%d%d?%d?%d?$')
  return unique ~= nil and #unique == 32
end

-- The server refuses a script's first write when its memory is full, and none after that. This
-- write, allowed always, lets those operations through that end jobs and so free memory.
local function proceed_when_memory_is_full()
  redis.call('ZREM', LEASES, '')
end

-- Leases that end because the server was away are nobody's crash. Called by whoever proves that
-- workers reach the server: after a silence of half a lease, leases that ended in it or end soon
-- after are let be until every worker had the time of one to come back. Those that had ended before
-- are not: a queue where calls are rare shall not wait for ever.
local function note_activity(lease_ms)
  local seen = tonumber(redis.call('HGET', LOAD, 'seen') or NOW)
  if NOW - seen > lease_ms / 2 then
    redis.call('HSET', LOAD, 'silence', seen, 'grace', NOW + lease_ms)
  end
  redis.call('HSET', LOAD, 'seen', NOW)
end

-- Scores in `leases` of jobs that wait for a worker: for one that runs nothing beside, given back,
-- or left by one that is known to be gone, which is a crash.
local ALONE, GIVEN_BACK, LEFT = -1, 0, 1

-- The job's state as a table; nil when it is not known (any more).
local function read_job(id)
  local v = redis.call('HMGET', job_key(id), 'state', 'lane', 'entry', 'owner', 'epoch', 'offset',
    'cancel', 'deadline', 'cost', 'prompt', 'budget', 'crashes', 'handoffs', 'ready', 'waited',
    'retention', 'idem', 'exact', 'sized')
  if not v[1] then return nil end
  return {
    id = id, state = v[1], lane = v[2], entry = v[3], owner = v[4], epoch = tonumber(v[5]),
    offset = tonumber(v[6]), cancel = v[7] == '1', deadline = tonumber(v[8]),
    cost = tonumber(v[9]), prompt = tonumber(v[10]), budget = tonumber(v[11]),
    crashes = tonumber(v[12]), handoffs = tonumber(v[13]), ready = tonumber(v[14]),
    waited = tonumber(v[15]), retention = tonumber(v[16]), idem = v[17],
    exact = v[18] == '1', sized = v[19] == '1',
  }
end

-- Whether a worker has the job in hand, so that only that worker may end it.
local function is_held(job)
  return job.state == 'running' and tonumber(redis.call('ZSCORE', LEASES, job.id) or 0) > NOW
end

-- Two lanes may use the same entry id.
local function is_entry_of(job, lane, entry) return job.lane == lane and job.entry == entry end

local function is_expired(job) return job.deadline > 0 and job.deadline <= NOW end

local function add(counter, delta)
  if delta ~= 0 then redis.call('HINCRBY', LOAD, counter, delta) end
end

-- Which counter of `load` a job in each state belongs to.
local COUNTER = { queued = 'queued', released = 'queued', delayed = 'delayed', running = 'running' }

-- Change the state that counters go by. While no worker keeps a job's events, they do not expire.
local function move(job, state)
  if COUNTER[job.state] then add(COUNTER[job.state], -1) end
  if COUNTER[state] then add(COUNTER[state], 1) end
  job.state = state
  redis.call('HSET', job_key(job.id), 'state', state)
  if state == 'released' then redis.call('PERSIST', out_key(job.id)) end
end

-- Create the lane's group at 0, never at `$`: the group's lag would be unknown.
local function ensure_group(lane)
  redis.pcall('XGROUP', 'CREATE', STREAMS[lane], GROUP, '0', 'MKSTREAM')
end

-- Keep the events of a job that a worker holds: at least until its lease can have been taken over.
local function keep_events(id, job_retention, retention_ms, lease_ms)
  redis.call('PEXPIRE', out_key(id), math.max(retention_ms, job_retention, 2 * lease_ms))
end

local function append_to_lane(lane, id, cost, payload)
  if redis.call('EXISTS', STREAMS[lane]) == 0 then ensure_group(lane) end
  local entry = redis.call('XADD', STREAMS[lane], '*', 'id', id, 'cost', cost, 'job', payload)
  redis.call('HSET', LOAD, 'tail:' .. lane, entry)
  return entry
end

-- Remove a delivered entry. An undelivered one is never removed: the lag would be unknown.
local function drop_entry(lane, entry)
  redis.call('XACK', STREAMS[lane], GROUP, entry)
  redis.call('XDEL', STREAMS[lane], entry)
end

-- The value of field `name` in a flat list of names and values.
local function field(list, name)
  for i = 1, #list - 1, 2 do
    if list[i] == name then return list[i + 1] end
  end
  return nil
end

-- Put the end aside for the webhook, if the job has one, in the same step as the end itself.
local function announce(job, reason)
  local hook = redis.call('HGET', job_key(job.id), 'hook')
  if hook then
    redis.call('XADD', OUTBOX, '*', 'id', job.id, 'finish', reason, 'time', NOW, 'hook', hook)
  end
end

-- Do all that the end of a job takes, except its terminal event, which the caller appends.
local function settle(job, reason, retention_ms, owner)
  local key = job_key(job.id)
  announce(job, reason)
  redis.call('ZREM', LEASES, job.id)
  redis.call('ZREM', DELAYED, job.id)
  if job.state == 'running' or job.state == 'released' then drop_entry(job.lane, job.entry) end
  add('prompt_tokens', -job.prompt)
  add('budget_tokens', -math.max(job.budget, 0))
  move(job, 'done')
  add('ended', 1)
  redis.call('HSET', key, 'finish', reason, 'finished', NOW, 'owner', owner or '')
  redis.call('HDEL', key, 'payload')
  local keep = math.max(retention_ms, job.retention)
  redis.call('PEXPIRE', key, keep)
  redis.call('PEXPIRE', out_key(job.id), keep)
  if job.idem then redis.call('PEXPIRE', PREFIX .. 'idem:' .. job.idem, keep) end
end

-- End a job from here: its terminal event (see messages.py) and all the rest.
-- `code` and `message` go with reason `error`.
local function finish(job, reason, retention_ms, code, message)
  local ending = {
    f = reason, p = job.exact and job.prompt or 0, h = 0, c = job.offset,
    q = math.max(job.waited or NOW - job.ready, 0), pf = 0, d = 0, a = job.epoch,
  }
  if code then ending.er = { code, message, false, false } end
  local event = { i = 0, o = job.offset, f = reason, ['end'] = ending }
  local entry, packed = string.format('%d-1', job.offset), cmsgpack.pack(event)
  local added = redis.pcall('XADD', out_key(job.id), entry, 'e', packed)
  if type(added) == 'table' and added.err then
    -- The stream holds what the job never published. A reader shall see an end, not wait for ever.
    redis.call('PEXPIRE', out_key(job.id), 0) -- deletes it, by a right that producers have
    redis.call('XADD', out_key(job.id), entry, 'e', packed)
  end
  settle(job, reason, retention_ms)
end

-- Keep what could not be served. kind: `crashed` (may be redriven) or `undecodable`.
local function bury(kind, lane, entry, id, reason, payload, job)
  if kind == 'undecodable' then payload = string.sub(payload, 1, MAX_DEAD_PAYLOAD) end
  local kept = job and redis.call('HMGET', job_key(job.id), 'note', 'hook') or {}
  redis.call('XADD', DEAD, 'MAXLEN', '~', MAX_DEAD_LETTERS, '*', 'kind', kind, 'lane', lane,
    'entry', entry, 'id', id, 'reason', reason, 'payload', payload, 'time', NOW,
    'prompt', job and job.prompt or 0, 'budget', job and job.budget or 0,
    'crashes', job and job.crashes or 0, 'retention', job and job.retention or 0,
    'note', kept[1] or '', 'hook', kept[2] or '')
end

-- The payload of a lane entry; nil when it is gone.
local function read_payload(lane, entry)
  local found = redis.call('XRANGE', STREAMS[lane], entry, entry)[1]
  return found and field(found[2], 'job')
end

-- Record a new job and put it in its lane, or aside until `delay_ms` have passed.
local function admit(id, payload, lane, prompt, budget, cost, deadline_ms, delay_ms, retention_ms,
                     digest, idem, note, hook)
  local delayed = delay_ms > 0
  local key = job_key(id)
  redis.call('HSET', key, 'state', delayed and 'delayed' or 'queued', 'lane', lane, 'entry', '',
    'owner', '', 'epoch', 0, 'offset', 0, 'cancel', 0, 'deadline',
    deadline_ms > 0 and NOW + deadline_ms or 0, 'cost', cost, 'prompt', prompt, 'budget', budget,
    'crashes', 0, 'handoffs', 0, 'created', NOW, 'ready', NOW + delay_ms,
    'retention', retention_ms, 'digest', digest)
  if idem ~= '' then redis.call('HSET', key, 'idem', idem) end
  if note ~= '' then redis.call('HSET', key, 'note', note) end
  if hook ~= '' then redis.call('HSET', key, 'hook', hook) end
  if delayed then
    redis.call('HSET', key, 'payload', payload)
    redis.call('ZADD', DELAYED, NOW + delay_ms, id)
  else
    redis.call('HSET', key, 'entry', append_to_lane(lane, id, cost, payload))
  end
  add(delayed and 'delayed' or 'queued', 1)
  add('prompt_tokens', prompt)
  add('budget_tokens', math.max(budget, 0))
end

-- Move delayed jobs that are due into their lanes, as many as one call may. Returns how many were
-- looked at.
local function promote_due(retention_ms)
  local due = redis.call('ZRANGEBYSCORE', DELAYED, '-inf', NOW, 'LIMIT', 0, MAX_PROMOTED)
  local bytes = 0
  for i, id in ipairs(due) do
    local job = read_job(id)
    local payload = redis.call('HGET', job_key(id), 'payload')
    if not job or job.state ~= 'delayed' then
      redis.call('ZREM', DELAYED, id)
    elseif is_expired(job) then
      finish(job, 'expired', retention_ms)
    else
      redis.call('ZREM', DELAYED, id)
      move(job, 'queued')
      redis.call('HSET', job_key(id), 'entry', append_to_lane(job.lane, id, job.cost, payload))
      redis.call('HDEL', job_key(id), 'payload')
      bytes = bytes + #payload
      if bytes >= MAX_READ_BYTES then return i end
    end
  end
  return #due
end

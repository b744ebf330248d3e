-- Hand a worker the jobs that fit the KV space it has free.
--
-- KEYS   as in prelude.lua
-- ARGV   1 worker   2 free tokens   3 idle (1: the worker runs nothing)   4 most jobs
--        5 max_model_len in tokens   6 block size in tokens   7 lease in ms   8 crashes until a job
--        is a dead letter   9 retention in ms   10 ms for which a job that does not fit may be
--        passed by   11 to 13 the weights of high, normal, low   14 most errands, which are jobs of
--        cost 0, besides the jobs
-- Reply  {claimed jobs, last ids of high, normal, low ('': what arrives there changes nothing for
--        this worker now), ms to the next due job or lease end (-1: none; 0 also when a bound below
--        cut this call short), waiting (1: there is work that was not taken)}; a claimed job is
--        {id, lane, epoch, payload, cost, offset, crashes, ms to the deadline (-1: none), ms
--        queued, tokens of whole blocks that it counts as, alone (1: the worker shall run nothing
--        beside it)}
-- O(log n) for each job handed out, and for at most 128 promoted, 128 looked at for takeover and
-- 256 removed from the lanes. No job is handed out after the one whose payload brings the reply to
-- 1 MiB: it ends the call, with the rest for the next one.
--
-- In order: delayed jobs that are due enter their lanes; jobs whose lease ended or was given back
-- are taken over; then the lanes, by weighted stride scheduling: the lane with the lowest virtual
-- time is next, and a job moves its lane's time by 1 / weight. A job that does not fit holds up its
-- own lane only, until the other lanes have passed it by for too long. Errands take no room and
-- have places of their own: while some are left, an errand at the head of a lane waits for nothing.
--
-- A job that is one crash from its end is run alone, so that those beside a poisonous job are not
-- blamed for it. One worker at a time makes way for such jobs: it takes nothing else until it is
-- idle, and then one after the other. Another takes one when it is idle and has nothing else to do.

local worker, free_tokens, idle = ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1'
local max_jobs, max_model_len, block_size = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local lease_ms, max_crashes, retention_ms = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local starve_ms = tonumber(ARGV[10])
local errands_left = tonumber(ARGV[14] or 0)
local WEIGHTS = { high = tonumber(ARGV[11]), normal = tonumber(ARGV[12]), low = tonumber(ARGV[13]) }
local MAX_TAKEOVERS, MAX_REMOVED = 64, 256
-- Bytes of payloads at which a reply ends. With the longest job as its last it stays below 9 MiB: a
-- link that can carry this job can carry the reply, which would else be claimed and lost for ever.
-- Less would cost a call for every few jobs of ordinary size.
local MAX_BYTES = 1048576

proceed_when_memory_is_full()
note_activity(lease_ms)

local claimed = {}
local taken = 0 -- claimed jobs that are no errands
local waiting = false
local unfinished = false -- whether a claim right after this one would get further
local last = {} -- lane -> id of the last entry delivered
local removals_left = MAX_REMOVED
local bytes_left = MAX_BYTES

-- A bound of a job's cost may be far too high, so it counts as one whole context at most. What a
-- worker has counted may be several contexts: a job of many outputs.
local function space_for(job)
  local tokens = job.sized and job.cost or math.min(job.cost, max_model_len)
  return math.ceil(tokens / block_size) * block_size
end

local function must_run_alone(job) return max_crashes > 1 and job.crashes >= max_crashes - 1 end

local function fits(job)
  return job.cost == 0 or space_for(job) <= free_tokens or (idle and #claimed == 0)
end

local function has_place(job)
  return taken < max_jobs or (job.cost == 0 and errands_left > 0)
end

-- Whether this worker is the one that empties itself for jobs that must run alone. Kept as `<last
-- claim> <worker>`; one that does not claim any more, as while it runs one, may be replaced.
local function makes_way()
  local since, name = string.match(redis.call('HGET', LOAD, 'makes_way') or '', '^(%d+) (.*)$')
  if name and name ~= worker and NOW - since <= lease_ms then return false end
  redis.call('HSET', LOAD, 'makes_way', string.format('%d %s', NOW, worker))
  return true
end

local function hand_out(job, payload)
  local waited = job.waited or math.max(NOW - job.ready, 0)
  local epoch = job.epoch + 1
  move(job, 'running')
  redis.call('HSET', job_key(job.id), 'owner', worker, 'epoch', epoch, 'claimed', NOW,
    'waited', waited)
  redis.call('ZADD', LEASES, NOW + lease_ms, job.id)
  keep_events(job.id, job.retention, retention_ms, lease_ms)
  free_tokens = free_tokens - space_for(job)
  bytes_left = bytes_left - #payload
  if job.cost == 0 and errands_left > 0 then
    errands_left = errands_left - 1
  else
    taken = taken + 1
  end
  claimed[#claimed + 1] = { job.id, job.lane, epoch, payload, job.cost, job.offset, job.crashes,
    job.deadline > 0 and job.deadline - NOW or -1, waited, space_for(job),
    must_run_alone(job) and 1 or 0 }
end

-- For how long the same job has been the first of `place` without fitting. Kept as `<since> <last
-- delivered id> <job id>`, which also spares the next claim reading that job's entry.
local function passed_by_for(place, id)
  local kept = redis.call('HGET', LOAD, 'blocked:' .. place)
  local since, mark, blocked = string.match(kept or '', '^(%d+) (%S+) (%S+)$')
  if mark == (last[place] or '-') and blocked == id then return NOW - since end
  redis.call('HSET', LOAD, 'blocked:' .. place,
    string.format('%d %s %s', NOW, last[place] or '-', id))
  return 0
end

local function open_lane(lane)
  local groups = redis.pcall('XINFO', 'GROUPS', STREAMS[lane])
  for _, group in ipairs(groups.err and {} or groups) do
    if field(group, 'name') == GROUP then
      last[lane] = field(group, 'last-delivered-id')
      return
    end
  end
  ensure_group(lane)
  last[lane] = '0-0'
end

-- Take a job away from a worker whose lease ended. Returns whether it may be tried again.
local function survives_crash(job)
  job.crashes = job.crashes + 1
  redis.call('HSET', job_key(job.id), 'crashes', job.crashes, 'owner', '')
  if job.crashes >= max_crashes then
    local message = job.crashes == 1 and '1 worker died or hung while it ran the job'
      or string.format('%d workers died or hung while they ran the job', job.crashes)
    if max_crashes > 1 then message = message .. ', the last with nothing beside it' end
    bury('crashed', job.lane, job.entry, job.id, message,
      read_payload(job.lane, job.entry) or '', job)
    finish(job, 'error', retention_ms, 'worker_crashed', message)
    return false
  end
  move(job, 'released')
  redis.call('ZADD', LEASES, GIVEN_BACK, job.id)
  return true
end

local function resume(job)
  local got = redis.call('XCLAIM', STREAMS[job.lane], GROUP, worker, 0, job.entry, 'FORCE')[1]
  local payload = got and field(got[2], 'job')
  if not payload then
    finish(job, 'error', retention_ms, 'internal_error', 'the entry of the job is gone')
  elseif job.offset > 0 and redis.call('EXISTS', out_key(job.id)) == 0 then
    finish(job, 'error', retention_ms, 'internal_error',
      'the events of the job expired before another worker could go on')
  else
    hand_out(job, payload)
  end
end

-- The state of a job that waits for another worker; nil when it has ended, perhaps just now.
local function read_left(id)
  local job = read_job(id)
  if not job or (job.state ~= 'running' and job.state ~= 'released') then
    redis.call('ZREM', LEASES, id)
  elseif job.cancel then
    finish(job, 'cancelled', retention_ms)
  elseif is_expired(job) then
    finish(job, 'expired', retention_ms)
  else
    return job
  end
  return nil
end

-- Sort out what was left behind, and count crashes. Returns the jobs that may run beside others,
-- and whether there may be more.
local function sort_out()
  local load = redis.call('HMGET', LOAD, 'grace', 'silence')
  local last_end = NOW
  if NOW < tonumber(load[1] or 0) then last_end = math.max(LEFT, tonumber(load[2] or 0)) end
  local due = redis.call('ZRANGEBYSCORE', LEASES, GIVEN_BACK, last_end, 'LIMIT', 0, MAX_TAKEOVERS)
  local ready = {}
  for _, id in ipairs(due) do
    local job = read_left(id)
    if job and (job.state == 'released' or survives_crash(job)) then
      if must_run_alone(job) then
        redis.call('ZADD', LEASES, ALONE, id)
      else
        ready[#ready + 1] = job
      end
    end
  end
  return ready, #due == MAX_TAKEOVERS
end

local function next_suspect()
  local ids = redis.call('ZRANGEBYSCORE', LEASES, ALONE, ALONE, 'LIMIT', 0, MAX_TAKEOVERS)
  for _, id in ipairs(ids) do
    local job = read_left(id)
    if job and must_run_alone(job) then return job end
    if job then redis.call('ZADD', LEASES, GIVEN_BACK, id) end -- this worker's limit is higher
  end
  return nil
end

local function take_no_more() max_jobs, errands_left = taken, 0 end

local function run_alone(job)
  resume(job)
  take_no_more()
end

-- Take jobs that may run beside others. Returns whether one of them has waited for too long, so
-- that the lanes may not be served.
local function take_over(ready, is_cut)
  local blocked, starving = false, false
  for _, job in ipairs(ready) do
    if bytes_left <= 0 then
      waiting = true
      break
    end
    if has_place(job) and fits(job) and (job.cost == 0 or not starving) then
      resume(job)
    else
      waiting = true
      if taken < max_jobs and not blocked then
        blocked = true
        starving = passed_by_for('leases', job.id) >= starve_ms
      end
    end
  end
  if is_cut then
    waiting = true
    unfinished = not blocked and taken < max_jobs
  end
  return starving
end

-- The job id and fields of the lane's next entry; the fields are nil when the entry need not be
-- read because its job is known not to have fitted. nil when there is none.
local function peek(lane)
  local kept = redis.call('HGET', LOAD, 'blocked:' .. lane)
  local mark, id = string.match(kept or '', '^%d+ (%S+) (%S+)$')
  if mark == last[lane] then return id, nil end
  local entry = redis.call('XRANGE', STREAMS[lane], '(' .. last[lane], '+', 'COUNT', 1)[1]
  if not entry then return nil, nil end
  return field(entry[2], 'id') or '', entry[2]
end

local function deliver(lane)
  local got = redis.call('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', 1, 'STREAMS',
    STREAMS[lane], '>')
  local entry = got[1][2][1]
  last[lane] = entry[1]
  return entry[1], entry[2]
end

-- Remove an entry that holds no job to run.
local function discard(lane)
  removals_left = removals_left - 1
  local entry, fields = deliver(lane)
  drop_entry(lane, entry)
  return entry, fields
end

local function discard_undecodable(lane)
  local entry, fields = discard(lane)
  local payload = field(fields, 'job') or table.concat(fields, ' ')
  bury('undecodable', lane, entry, '', 'the entry has no job id, cost and job', payload)
end

-- The group was lost and made anew: the job runs, its entry only needs an owner again.
local function adopt(lane, job)
  removals_left = removals_left - 1
  local entry = deliver(lane)
  if not is_entry_of(job, lane, entry) then
    drop_entry(lane, entry)
    return
  end
  if job.owner ~= '' then
    redis.call('XCLAIM', STREAMS[lane], GROUP, job.owner, 0, entry, 'FORCE', 'JUSTID')
  end
  if not redis.call('ZSCORE', LEASES, job.id) then redis.call('ZADD', LEASES, NOW, job.id) end
end

local function is_well_formed(id, fields)
  return is_job_id(id)
    and (not fields or (field(fields, 'job') and tonumber(field(fields, 'cost') or '')))
end

-- Deal with the lane's next entry. Returns `empty`, `removed`, `blocked` or `claimed`.
local function serve(lane)
  local id, fields = peek(lane)
  if not id then return 'empty' end
  if not is_well_formed(id, fields) then
    discard_undecodable(lane)
    return 'removed'
  end
  local job = read_job(id)
  if not job or (job.state ~= 'queued' and job.state ~= 'running' and job.state ~= 'released') then
    discard(lane)
    return 'removed'
  end
  if job.state ~= 'queued' then
    adopt(lane, job)
    return 'removed'
  end
  if is_expired(job) then
    discard(lane)
    finish(job, 'expired', retention_ms)
    return 'removed'
  end
  if not has_place(job) or not fits(job) then return 'blocked', id end
  local entry, delivered = deliver(lane)
  if not is_entry_of(job, lane, entry) then
    drop_entry(lane, entry)
    return 'removed'
  end
  hand_out(job, field(delivered, 'job'))
  return 'claimed'
end

local virtual = {} -- lane -> virtual time
local function now_virtual() return tonumber(redis.call('HGET', LOAD, 'clock') or 0) end

-- The open lane to serve next. One that was empty starts at the present virtual time: the turns it
-- did not use are lost, so that it cannot burst.
local function next_lane(open, present)
  local best = nil
  for _, lane in ipairs(LANES) do
    if open[lane] then
      virtual[lane] = math.max(virtual[lane], present)
      if not best or virtual[lane] < virtual[best] then best = lane end
    end
  end
  return best
end

-- Returns the lanes that nothing is left in, and whether a job that does not fit holds up all.
local function serve_lanes()
  local open, drained = { high = true, normal = true, low = true }, {}
  local present = now_virtual()
  for _, lane in ipairs(LANES) do
    virtual[lane] = tonumber(redis.call('HGET', LOAD, 'clock:' .. lane) or 0)
  end
  while taken < max_jobs and removals_left > 0 and bytes_left > 0 do
    local lane = next_lane(open, present)
    if not lane then break end
    local outcome, id = serve(lane)
    if outcome == 'claimed' then
      present = virtual[lane]
      virtual[lane] = virtual[lane] + 1 / WEIGHTS[lane]
      redis.call('HSET', LOAD, 'clock', string.format('%.17g', present), 'clock:' .. lane,
        string.format('%.17g', virtual[lane]))
    elseif outcome == 'empty' then
      open[lane], drained[lane] = nil, true
    elseif outcome == 'blocked' then
      waiting = true
      open[lane] = nil
      if passed_by_for(lane, id) >= starve_ms then return drained, true end
    end
  end
  return drained, false
end

-- Take the errands that stand at the head of a lane when nothing else may be taken.
local function serve_errands(drained)
  max_jobs = taken
  for _, lane in ipairs(LANES) do
    local outcome = drained[lane] and 'empty'
    while errands_left > 0 and removals_left > 0 and bytes_left > 0
      and outcome ~= 'empty' and outcome ~= 'blocked' do
      outcome = serve(lane)
    end
    if outcome == 'empty' then drained[lane] = true end
    if outcome == 'blocked' then waiting = true end
  end
end

-- For each lane the id after which a reader waits for new entries.
local function tails()
  local ids = {}
  for i, lane in ipairs(LANES) do
    local tail = redis.call('HGET', LOAD, 'tail:' .. lane) or last[lane]
    if redis.call('XLEN', STREAMS[lane]) == 0 then tail = last[lane] end
    ids[i] = tail
  end
  return ids
end

local function next_due()
  if unfinished or removals_left <= 0 or (bytes_left <= 0 and waiting) then return 0 end
  local due = -1
  local delayed = redis.call('ZRANGE', DELAYED, 0, 0, 'WITHSCORES')[2]
  local lease = redis.call('ZRANGEBYSCORE', LEASES, '(' .. NOW, '+inf', 'WITHSCORES',
    'LIMIT', 0, 1)[2]
  for _, at in ipairs({ delayed or false, lease or false }) do
    if at then
      local ms = math.max(tonumber(at) - NOW, 0)
      if due < 0 or ms < due then due = ms end
    end
  end
  return due
end

for _, lane in ipairs(LANES) do open_lane(lane) end
promote_due(retention_ms)
local ready, is_cut = sort_out()
local suspect = max_jobs > 0 and next_suspect() or nil
if suspect and makes_way() then
  waiting = true
  if idle then run_alone(suspect) end
  take_no_more()
  suspect = nil
end
local drained, is_held_up = {}, take_over(ready, is_cut)
if not is_held_up then drained, is_held_up = serve_lanes() end
local is_full = taken >= max_jobs
serve_errands(drained)
if suspect and idle and #claimed == 0 then run_alone(suspect) end
local tail_ids = tails()
for i, lane in ipairs(LANES) do
  if drained[lane] then
    tail_ids[i] = last[lane]
  elseif tail_ids[i] ~= last[lane] then
    waiting, tail_ids[i] = true, ''
  elseif errands_left == 0 and (is_held_up or is_full) then
    tail_ids[i] = ''
  end
end
return { claimed, tail_ids, next_due(), waiting and 1 or 0 }

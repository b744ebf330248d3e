-- Hand back jobs that a worker was given in a reply that it never saw, or lost with its engine.
--
-- KEYS   as in prelude.lua
-- ARGV   1 worker   2 crashed (1: whoever ran them is gone, which counts as a crash of each)
--        3 where the call before stopped ('': begin)   then the ids of the jobs that it has
-- Reply  {how many were handed back, where it stopped ('': no entry is left to look at)}
-- O(consumers) unless the worker has more pending entries than jobs known; then O(log n) for at
-- most 1,000 of them, of 16 MiB and one more, which holds the server for some 20 ms. Whoever calls
-- goes on until none is left. No claim of the same worker may be under way.

local worker, crashed = ARGV[1], ARGV[2] == '1'
local lane_left, start = string.match(ARGV[3], '^(%a+) (%S+)$')
local FIRST_ID, MAX_LOOKED = 4, 1000
proceed_when_memory_is_full()

local known = {}
for i = FIRST_ID, #ARGV do known[ARGV[i]] = true end

local function count_pending()
  local total = 0
  for _, lane in ipairs(LANES) do
    local summary = redis.pcall('XPENDING', STREAMS[lane], GROUP)
    for _, consumer in ipairs(not summary.err and summary[4] or {}) do
      if consumer[1] == worker then total = total + tonumber(consumer[2]) end
    end
  end
  return total
end

local function hand_back(job)
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
end

local looked, bytes, returned = 0, 0, 0

-- Returns where it stopped; nil at the end of the lane.
local function look_through(lane, from)
  local entries = redis.pcall('XPENDING', STREAMS[lane], GROUP, from, '+', MAX_LOOKED - looked,
    worker)
  for _, item in ipairs(entries.err and {} or entries) do
    local entry = redis.call('XRANGE', STREAMS[lane], item[1], item[1])[1]
    local job = entry and read_job(field(entry[2], 'id') or '')
    if job and job.state == 'running' and job.owner == worker and not known[job.id] then
      hand_back(job)
      returned = returned + 1
    end
    looked = looked + 1
    bytes = bytes + #(entry and field(entry[2], 'job') or '')
    if looked >= MAX_LOOKED or bytes >= MAX_READ_BYTES then return lane .. ' (' .. item[1] end
  end
  return nil
end

if not lane_left and count_pending() <= #ARGV - FIRST_ID + 1 then return { 0, '' } end
for _, lane in ipairs(LANES) do
  if not lane_left or lane == lane_left then
    local stopped = look_through(lane, lane_left and start or '-')
    if stopped then return { returned, stopped } end
    lane_left = nil
  end
end
return { returned, '' }

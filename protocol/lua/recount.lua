-- Count anew what the counters of `load` stand for, if the queue is short enough to look at all.
--
-- KEYS   as in prelude.lua
-- ARGV   1 most entries and delayed jobs looked at
-- Reply  {1 if it counted, 0 if there are too many or their payloads too large, how many counters
--        were wrong}
-- O(entries), and their payloads up to 64 MiB; O(1) with too many.

local NAMES = { 'queued', 'running', 'delayed', 'prompt_tokens', 'budget_tokens' }
local PAGE = 16
-- It counts all or nothing, so it may hold the server for longer than calls that go on later.
local MAX_BYTES = 4 * MAX_READ_BYTES
proceed_when_memory_is_full()

local total = redis.call('ZCARD', DELAYED)
for _, lane in ipairs(LANES) do total = total + redis.call('XLEN', STREAMS[lane]) end
if total > tonumber(ARGV[1]) then return { 0, 0 } end

local counts = { queued = 0, running = 0, delayed = 0, prompt_tokens = 0, budget_tokens = 0 }
local function count(job)
  local name = COUNTER[job.state]
  if not name then return end
  counts[name] = counts[name] + 1
  counts.prompt_tokens = counts.prompt_tokens + job.prompt
  counts.budget_tokens = counts.budget_tokens + math.max(job.budget, 0)
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', DELAYED, '-inf', '+inf')) do
  local job = read_job(id)
  if job and job.state == 'delayed' then count(job) end
end
local bytes = 0
for _, lane in ipairs(LANES) do
  local after = '-'
  repeat
    local entries = redis.call('XRANGE', STREAMS[lane], after, '+', 'COUNT', PAGE)
    for _, entry in ipairs(entries) do
      local job = read_job(field(entry[2], 'id') or '')
      if job and is_entry_of(job, lane, entry[1]) then count(job) end
      after = '(' .. entry[1]
      bytes = bytes + #(field(entry[2], 'job') or '')
    end
    if bytes > MAX_BYTES then return { 0, 0 } end
  until #entries < PAGE
end

local kept, wrong = redis.call('HMGET', LOAD, unpack(NAMES)), 0
for i, name in ipairs(NAMES) do
  if tonumber(kept[i] or 0) ~= counts[name] then
    wrong = wrong + 1
    redis.call('HSET', LOAD, name, counts[name])
  end
end
return { 1, wrong }

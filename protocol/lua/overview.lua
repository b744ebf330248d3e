-- Say what a queue holds, all of one moment.
--
-- KEYS   as in prelude.lua
-- ARGV   none
-- Reply  {server's time in ms, for high, normal, low each {entries that no worker took yet, entries
--        delivered and not ended, ms that the oldest not taken has waited (-1: there is none)},
--        queued, running, delayed, prompt tokens, budget tokens (counters of `load`), released jobs
--        or lost ones that wait for a worker, dead letters, jobs that ever ended}
-- O(log n).

local reply = { NOW, {} }
for i, lane in ipairs(LANES) do
  local taken, last = 0, '0-0'
  local groups = redis.pcall('XINFO', 'GROUPS', STREAMS[lane])
  for _, group in ipairs(groups.err and {} or groups) do
    if field(group, 'name') == GROUP then
      taken, last = field(group, 'pending'), field(group, 'last-delivered-id')
    end
  end
  local oldest = redis.call('XRANGE', STREAMS[lane], '(' .. last, '+', 'COUNT', 1)[1]
  local waited = oldest and math.max(NOW - tonumber(string.match(oldest[1], '^%d+')), 0) or -1
  reply[2][i] = { redis.call('XLEN', STREAMS[lane]) - taken, taken, waited }
end
local counters = redis.call('HMGET', LOAD, 'queued', 'running', 'delayed', 'prompt_tokens',
  'budget_tokens', 'ended')
for i = 1, 5 do reply[#reply + 1] = tonumber(counters[i] or 0) end
reply[#reply + 1] = redis.call('ZCOUNT', LEASES, '-inf', NOW)
reply[#reply + 1] = redis.call('XLEN', DEAD)
reply[#reply + 1] = tonumber(counters[6] or 0)
return reply

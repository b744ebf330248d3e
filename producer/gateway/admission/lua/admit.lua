-- Charge a key for requests and tokens, and give it slots, if it has all of them; else nothing.
--
-- KEYS[1]  hash: what is left of the key's requests `r` and tokens `t` at time `at` (ms)
-- KEYS[2]  sorted set: slots in use, by the time (ms) at which their lease ends
-- ARGV     id, requests per minute, tokens per minute, concurrency (0: no limit),
--          requests, tokens, slots, lease in ms
-- Returns  {1 or 0, what is short of ('requests', 'tokens', 'concurrency', or ''), ms to wait,
--          requests left, ms until they are all back, tokens left, ms until they are all back}
--
-- Both budgets refill evenly, up to a minute's worth. Tokens are charged by a bound: a request
-- needs a full budget at most, and may take it below nothing, so that none is refused for ever.
-- An id that holds slots is not charged again. O(log n) in the slots.
local id = ARGV[1]
local per_minute = { r = tonumber(ARGV[2]), t = tonumber(ARGV[3]) }
local max_slots = tonumber(ARGV[4])
local cost = { r = tonumber(ARGV[5]), t = tonumber(ARGV[6]) }
local slots, lease_ms = tonumber(ARGV[7]), tonumber(ARGV[8])

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local kept = redis.call('HMGET', KEYS[1], 'r', 't', 'at')
local elapsed = math.max(0, now - tonumber(kept[3] or now))
local left = {}
for index, name in ipairs({ 'r', 't' }) do
  local limit = per_minute[name]
  local before = tonumber(kept[index] or limit)
  left[name] = math.min(limit, before + elapsed * limit / 60000)
end

redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local is_repeat = slots > 0 and redis.call('ZSCORE', KEYS[2], id .. ':0')

local short, wait = '', 0
if not is_repeat then
  for _, name in ipairs({ 'r', 't' }) do
    local limit = per_minute[name]
    local missing = math.min(cost[name], limit) - left[name]
    if limit > 0 and missing > 0 and missing * 60000 / limit > wait then
      short = name == 'r' and 'requests' or 'tokens'
      wait = math.ceil(missing * 60000 / limit)
    end
  end
  if short == '' and max_slots > 0 and redis.call('ZCARD', KEYS[2]) + slots > max_slots then
    short, wait = 'concurrency', 1000
  end
  if short == '' then
    local back = 60000
    for _, name in ipairs({ 'r', 't' }) do
      left[name] = left[name] - cost[name]
      local limit = per_minute[name]
      if limit > 0 then
        back = math.max(back, math.ceil((limit - left[name]) * 60000 / limit))
      end
    end
    redis.call('HSET', KEYS[1], 'r', tostring(left.r), 't', tostring(left.t), 'at', now)
    redis.call('PEXPIRE', KEYS[1], back + 60000)
    for slot = 0, slots - 1 do
      redis.call('ZADD', KEYS[2], now + lease_ms, id .. ':' .. slot)
    end
    if slots > 0 then
      redis.call('PEXPIRE', KEYS[2], 2 * lease_ms)
    end
  end
end

local reply = { short == '' and 1 or 0, short, wait }
for _, name in ipairs({ 'r', 't' }) do
  local limit = per_minute[name]
  reply[#reply + 1] = math.max(0, math.floor(left[name]))
  reply[#reply + 1] = limit > 0 and math.ceil((limit - left[name]) * 60000 / limit) or 0
end
return reply

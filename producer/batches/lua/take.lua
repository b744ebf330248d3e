-- Take batches that nobody runs, for as long as a lease; each gets a token, higher than any before.
--
-- KEYS   1 due
-- ARGV   1 what the keys of batches start with   2 most of them   3 lease in ms
-- Reply  for each {id, token}; token 0 where the record is damaged
-- O(log n) for each. One whose lease is not renewed is due again; the writes of an older token fail.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local taken = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[2])) do
  local key = ARGV[1] .. id
  if redis.call('EXISTS', key) == 1 then
    local token = redis.pcall('HINCRBY', key, 'token', 1)
    taken[#taken + 1] = { id, type(token) == 'number' and token or 0 }
    redis.call('ZADD', KEYS[1], now + ARGV[3], id)
  else
    redis.call('ZREM', KEYS[1], id)
  end
end
return taken

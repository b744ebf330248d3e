-- Take deliveries that are due, for as long as a lease.
--
-- KEYS   1 due
-- ARGV   1 what the keys of deliveries start with   2 most of them   3 lease in ms
-- Reply  for each {id, number of this attempt, URL, name of the secret, body, job, traceparent,
--        tracestate}
-- O(log n) for each. One that is not reported within its lease is due again.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local taken = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[2])) do
  local key = ARGV[1] .. id
  local kept = redis.call('HMGET', key, 'state', 'url', 'secret', 'body', 'job', 'tp', 'ts')
  if kept[1] == 'waiting' then
    local attempt = redis.call('HINCRBY', key, 'attempts', 1)
    redis.call('ZADD', KEYS[1], now + ARGV[3], id)
    taken[#taken + 1] = { id, attempt, kept[2], kept[3], kept[4], kept[5] or '',
      kept[6] or '', kept[7] or '' }
  else
    redis.call('ZREM', KEYS[1], id)
  end
end
return taken

-- Make a dead delivery due again, with all its attempts.
--
-- KEYS   1 the delivery   2 due   3 dead
-- ARGV   1 id
-- Reply  1, or 0 if it is not dead
-- O(log n).

if redis.call('HGET', KEYS[1], 'state') ~= 'dead' then
  redis.call('ZREM', KEYS[3], ARGV[1])
  return 0
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], 'state', 'waiting', 'attempts', 0, 'updated', now)
redis.call('PERSIST', KEYS[1])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('ZADD', KEYS[2], now, ARGV[1])
return 1

-- Say what became of an attempt.
--
-- KEYS   1 the delivery   2 due   3 dead   4 log
-- ARGV   1 id   2 number of the attempt   3 `delivered` | `retry` | `dead` | `postponed` (it was not
--        made and counts for nothing)   4 ms until the next   5 reason ('' when delivered)
--        6 HTTP status (0: none)   7 ms that it took   8 host   9 ms to keep a delivered one
--        10 ms to keep a dead one   11 most dead ones   12 most entries of the log
--        13 what the keys of deliveries start with
-- Reply  1, or 0 if the attempt is not the last one taken: nothing is written then
-- O(log n).

local id, outcome, reason = ARGV[1], ARGV[3], ARGV[5]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local kept = redis.call('HMGET', KEYS[1], 'state', 'attempts')
if kept[1] ~= 'waiting' or kept[2] ~= ARGV[2] then return 0 end

if outcome == 'postponed' then
  redis.call('HINCRBY', KEYS[1], 'attempts', -1)
  redis.call('ZADD', KEYS[2], now + ARGV[4], id)
  return 1
end
redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[12], '*', 'id', id, 'attempt', ARGV[2],
  'outcome', outcome, 'reason', reason, 'status', ARGV[6], 'ms', ARGV[7], 'host', ARGV[8])
redis.call('HSET', KEYS[1], 'updated', now, 'reason', reason, 'status', ARGV[6])
if outcome == 'retry' then
  redis.call('ZADD', KEYS[2], now + ARGV[4], id)
  return 1
end
redis.call('ZREM', KEYS[2], id)
redis.call('HSET', KEYS[1], 'state', outcome)
if outcome == 'delivered' then
  redis.call('HDEL', KEYS[1], 'body')
  redis.call('PEXPIRE', KEYS[1], ARGV[9])
  return 1
end
redis.call('PEXPIRE', KEYS[1], ARGV[10])
redis.call('ZADD', KEYS[3], now, id)
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - ARGV[10])
local excess = redis.call('ZCARD', KEYS[3]) - ARGV[11]
if excess > 0 then
  for _, oldest in ipairs(redis.call('ZRANGE', KEYS[3], 0, excess - 1)) do
    redis.call('DEL', ARGV[13] .. oldest)
  end
  redis.call('ZREMRANGEBYRANK', KEYS[3], 0, excess - 1)
end
return 1

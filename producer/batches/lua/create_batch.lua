-- Record a batch and make it due, once however often it is asked; its input stays until its end.
--
-- KEYS   1 the batch   2 batches of its owner   3 the input file   4 due
-- ARGV   1 id   2… fields of the hash
-- Reply  1, or 0 if there is no such file
-- O(log n).

if redis.call('EXISTS', KEYS[1]) == 1 then return 1 end
if redis.call('EXISTS', KEYS[3]) == 0 then return 0 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HINCRBY', KEYS[3], 'uses', 1)
redis.call('HSET', KEYS[1], 'token', 0, unpack(ARGV, 2))
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('ZADD', KEYS[4], now, ARGV[1])
return 1

-- Record a delivery and make it due, once however often it is asked.
--
-- KEYS   1 the delivery   2 due
-- ARGV   1 id   2 job   3 event   4 URL   5 name of the secret   6 body   7 traceparent and
--        8 tracestate of the job, or empty
-- Reply  1, or 0 if it is known already
-- O(log n).

if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], 'state', 'waiting', 'job', ARGV[2], 'event', ARGV[3], 'url', ARGV[4],
  'secret', ARGV[5], 'body', ARGV[6], 'attempts', 0, 'created', now, 'updated', now, 'reason', '',
  'tp', ARGV[7], 'ts', ARGV[8])
redis.call('ZADD', KEYS[2], now, ARGV[1])
return 1

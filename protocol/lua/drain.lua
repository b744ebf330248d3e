-- Ask a worker to drain: it finds the mark at its next heartbeat.
--
-- KEYS   as in prelude.lua
-- ARGV   1 worker   2 ms for which the mark stands
-- Reply  1, or 0 if the queue knows no such worker
-- O(1).

proceed_when_memory_is_full()
if redis.call('HEXISTS', WORKERS, ARGV[1]) == 0 then return 0 end
redis.call('SET', drain_key(ARGV[1]), 1, 'PX', ARGV[2])
return 1

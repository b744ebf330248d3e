-- Record a worker's heartbeat: what it is and how full it is; tell it what is asked of it.
--
-- KEYS   as in prelude.lua
-- ARGV   1 worker   2 msgpack map
-- Reply  {the server's time in ms, which is added to the map as `t`, 1 if it shall drain,
--        1 if somebody looks at the workers' blocks}
-- O(size of the map).

proceed_when_memory_is_full()
local info = cmsgpack.unpack(ARGV[2])
info.t = NOW
redis.call('HSET', WORKERS, ARGV[1], cmsgpack.pack(info))
return { NOW, redis.call('EXISTS', drain_key(ARGV[1])), redis.call('EXISTS', PREFIX .. 'watch') }

-- Record a worker's heartbeat: what it is and how full it is.
--
-- KEYS   as in prelude.lua
-- ARGV   1 worker   2 msgpack map
-- Reply  the server's time in ms, which is added to the map as `t`
-- O(size of the map).

proceed_when_memory_is_full()
local info = cmsgpack.unpack(ARGV[2])
info.t = NOW
redis.call('HSET', WORKERS, ARGV[1], cmsgpack.pack(info))
return NOW

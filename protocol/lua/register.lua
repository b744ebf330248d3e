-- Record a worker's heartbeat: what it is and how full it is; tell it what is asked of it.
--
-- KEYS   as in prelude.lua
-- ARGV   1 worker   2 msgpack map
-- Reply  {the server's time in ms, which is added to the map as `t`, 1 if it shall drain,
--        1 if somebody looks at the workers' blocks,
--        1 if the heartbeat before was another process's: both maps have a `process`, which differ}
-- O(size of the map).

proceed_when_memory_is_full()
local info = cmsgpack.unpack(ARGV[2])
info.t = NOW
local ok, before = pcall(cmsgpack.unpack, redis.call('HGET', WORKERS, ARGV[1]) or '')
local process = ok and type(before) == 'table' and before.process
local contested = process and info.process and process ~= info.process
redis.call('HSET', WORKERS, ARGV[1], cmsgpack.pack(info))
return { NOW, redis.call('EXISTS', drain_key(ARGV[1])), redis.call('EXISTS', PREFIX .. 'watch'),
  contested and 1 or 0 }

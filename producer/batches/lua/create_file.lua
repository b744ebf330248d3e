-- Record a file that is whole in the storage, once however often it is asked.
--
-- KEYS   1 the file   2 files of its owner   3 expiring
-- ARGV   1 id   2 when it expires in ms since 1970 ('' for never)   3… fields of the hash
-- Reply  1, or 0 if it is known already
-- O(log n).

if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'uses', 0, unpack(ARGV, 3))
redis.call('ZADD', KEYS[2], time[1] * 1000 + math.floor(time[2] / 1000), ARGV[1])
if ARGV[2] ~= '' then redis.call('ZADD', KEYS[3], ARGV[2], ARGV[1]) end
return 1

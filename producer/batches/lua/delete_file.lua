-- Forget a file that no batch under way reads.
--
-- KEYS   1 the file   2 files of its owner   3 expiring
-- ARGV   1 id
-- Reply  1; 0 if it is not known; -1 while a batch uses it: nothing is written then
-- O(log n).

local uses = redis.call('HGET', KEYS[1], 'uses')
if uses and tonumber(uses) > 0 then return -1 end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
return redis.call('DEL', KEYS[1])

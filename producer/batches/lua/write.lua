-- Write fields of a batch that this process runs, and renew its lease.
--
-- KEYS   1 the batch   2 due   3 its parts
-- ARGV   1 id   2 token   3 ms until another may take it (0: at once)   4 status wanted ('' as it is)
--        5 number of parts before the one that is added   6 that part ('' for none)
--        7… fields of the hash
-- Reply  the status now, or '' if it is another's meanwhile, or has ended: nothing is written then
-- O(log n). Twice is as good as once. What is being cancelled goes on being so.

local kept = redis.call('HMGET', KEYS[1], 'token', 'status')
local status, wanted = kept[2], ARGV[4]
if kept[1] ~= ARGV[2] or not redis.call('ZSCORE', KEYS[2], ARGV[1]) then return '' end
local time = redis.call('TIME')
redis.call('ZADD', KEYS[2], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3], ARGV[1])
if ARGV[6] ~= '' and redis.call('LLEN', KEYS[3]) == tonumber(ARGV[5]) then
  redis.call('RPUSH', KEYS[3], ARGV[6])
end
if #ARGV > 6 then redis.call('HSET', KEYS[1], unpack(ARGV, 7)) end
if wanted ~= '' and wanted ~= status and status ~= 'cancelling' then
  redis.call('HSET', KEYS[1], 'status', wanted, wanted .. '_at', time[1])
  status = wanted
end
return status

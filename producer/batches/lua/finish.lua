-- End a batch that this process runs: its files become known, its input is let go.
--
-- KEYS   1 the batch   2 due   3 its parts   4 the input file   5 files of the owner   6 expiring
--        7 the output file   8 the error file
-- ARGV   1 id   2 token   3 final status   4 when its record expires in ms since 1970
--        5 when its files expire in ms since 1970   6 id of the output file ('' for none)
--        7 id of the error file ('' for none)   8 number of fields of the batch's hash, then they,
--        then those of the output file, then as many of the error file
-- Reply  1, or 0 if it is another's meanwhile, or has ended
-- O(log n).

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] then return 0 end
if redis.call('ZREM', KEYS[2], ARGV[1]) == 0 then return 0 end

local first, number = 9, tonumber(ARGV[8])
if number > 0 then redis.call('HSET', KEYS[1], unpack(ARGV, first, first + number - 1)) end
first = first + number
number = 0
if ARGV[6] ~= '' or ARGV[7] ~= '' then
  number = (#ARGV - first + 1) / ((ARGV[6] ~= '' and 1 or 0) + (ARGV[7] ~= '' and 1 or 0))
end
for place, name in ipairs({ 'output_file_id', 'error_file_id' }) do
  local id = ARGV[5 + place]
  if id ~= '' then
    redis.call('HSET', KEYS[6 + place], 'uses', 0, unpack(ARGV, first, first + number - 1))
    redis.call('ZADD', KEYS[5], now, id)
    redis.call('ZADD', KEYS[6], ARGV[5], id)
    redis.call('HSET', KEYS[1], name, id)
    first = first + number
  end
end
redis.call('HSET', KEYS[1], 'status', ARGV[3], ARGV[3] .. '_at', time[1])
redis.call('HDEL', KEYS[1], 'checkpoint', 'repeated')
redis.call('DEL', KEYS[3])
redis.call('ZADD', KEYS[6], ARGV[4], ARGV[1])
if redis.call('EXISTS', KEYS[4]) == 1 then redis.call('HINCRBY', KEYS[4], 'uses', -1) end
return 1

-- End a batch that this process runs: its files become known, its input is let go.
--
-- KEYS   1 the batch   2 due   3 its parts   4 the input file   5 files of the owner   6 expiring
--        7 the output file   8 the error file
-- ARGV   1 id   2 token   3 final status   4 when its record expires in ms since 1970
--        5 when its files expire in ms since 1970   6 id of the output file ('' for none)
--        7 id of the error file ('' for none)   8 how many of the arguments that follow are fields of
--        the batch's hash   9 of the output file's   10 of the error file's
-- Reply  1, or 0 if it is another's meanwhile, or has ended
-- O(log n).

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] then return 0 end
if not redis.call('ZSCORE', KEYS[2], ARGV[1]) then return 0 end

local first = 11
local function fields(number)
  first = first + number
  return unpack(ARGV, first - number, first - 1)
end
if tonumber(ARGV[8]) > 0 then redis.call('HSET', KEYS[1], fields(tonumber(ARGV[8]))) end
for place, name in ipairs({ 'output_file_id', 'error_file_id' }) do
  local id = ARGV[5 + place]
  if id ~= '' then
    redis.call('HSET', KEYS[6 + place], 'uses', 0, fields(tonumber(ARGV[8 + place])))
    redis.call('ZADD', KEYS[5], now, id)
    redis.call('ZADD', KEYS[6], ARGV[5], id)
    redis.call('HSET', KEYS[1], name, id)
  end
end
redis.call('HSET', KEYS[1], 'status', ARGV[3], ARGV[3] .. '_at', time[1])
redis.call('HDEL', KEYS[1], 'checkpoint', 'repeated')
redis.call('DEL', KEYS[3])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZADD', KEYS[6], ARGV[4], ARGV[1])
if redis.call('EXISTS', KEYS[4]) == 1 then redis.call('HINCRBY', KEYS[4], 'uses', -1) end
return 1

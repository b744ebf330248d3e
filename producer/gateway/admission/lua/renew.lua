-- Keep slots for another lease, those that are still held.
--
-- KEYS[1]  sorted set: slots in use, by the time (ms) at which their lease ends
-- ARGV     lease in ms, then the slots
-- Returns  how many were still held
local lease_ms = tonumber(ARGV[1])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local held = 0
for index = 2, #ARGV do
  if redis.call('ZSCORE', KEYS[1], ARGV[index]) then
    redis.call('ZADD', KEYS[1], now + lease_ms, ARGV[index])
    held = held + 1
  end
end
if held > 0 then
  redis.call('PEXPIRE', KEYS[1], 2 * lease_ms)
end
return held

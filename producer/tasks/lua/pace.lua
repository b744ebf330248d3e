-- Ask whether a host may be called now, at an even rate for all processes together.
--
-- KEYS   1 the host
-- ARGV   1 ms between two calls   2 ms by which calls may come early, which makes a burst
--        3 ms for which the host itself asks to be left alone (0: it does not, this is a call)
-- Reply  0: call it; else ms to wait
-- O(1).

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local interval, early, pause = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local free_at = math.max(tonumber(redis.call('GET', KEYS[1]) or 0), now)
if pause > 0 then
  free_at = math.max(free_at, now + pause + early)
elseif free_at - now > early then
  return math.ceil(free_at - now - early)
else
  free_at = free_at + interval
end
redis.call('SET', KEYS[1], string.format('%.3f', free_at), 'PX', math.ceil(free_at - now) + 1)
return 0

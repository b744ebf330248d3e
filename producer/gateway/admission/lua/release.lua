-- Give slots back, and correct what their request was charged in tokens; once.
--
-- KEYS[1]  hash: what is left of the key's requests `r` and tokens `t` at time `at` (ms)
-- KEYS[2]  sorted set: slots in use, by the time (ms) at which their lease ends
-- ARGV     tokens per minute (0: no limit), tokens to give back (negative: to charge), the slots
-- Returns  1 if the slots were held, else 0: they were given back before, or their lease ran out
local limit, tokens = tonumber(ARGV[1]), tonumber(ARGV[2])
local held = 0
for index = 3, #ARGV do
  held = held + redis.call('ZREM', KEYS[2], ARGV[index])
end
if held == 0 then
  return 0
end
local left = redis.call('HGET', KEYS[1], 't')
if left and limit > 0 and tokens ~= 0 then
  -- what exceeds a minute's worth is cut off by the next `admit`, which knows the time gone by
  redis.call('HSET', KEYS[1], 't', tostring(tonumber(left) + tokens))
end
return 1

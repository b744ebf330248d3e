-- Ask for the end of a batch.
--
-- KEYS   1 the batch
-- Reply  the status before ('' if there is no such batch)
-- O(1).

local status = redis.call('HGET', KEYS[1], 'status')
if status == 'validating' or status == 'in_progress' then
  redis.call('HSET', KEYS[1], 'status', 'cancelling', 'cancelling_at', redis.call('TIME')[1])
end
return status or ''

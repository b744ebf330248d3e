-- Submit a job, once however often it is asked.
--
-- KEYS   as in prelude.lua; 9 idem:<key>, only with an idempotency key
-- ARGV   1 job id   2 payload   3 lane   4 prompt tokens   5 token budget (-1: none)   6 cost
--        7 deadline in ms from now (0: none)   8 delay in ms   9 digest of the content
--        10 queue limit (jobs)   11 retention in ms   12 idempotency key ('' for none)
--        13 the producer's note ('' for none)   14 the webhook to tell of the end ('' for none)
--        15 how long the outbox may be for a job with a webhook
-- Reply  {'created' | 'exists', job id} | {'conflict' | 'taken', other job id}
--        | {'full' | 'outbox_full', depth}
-- O(log n) in the delayed jobs, O(1) without a delay. Nothing is written unless `created`; refused
-- by the server when its memory is full.

local id, payload, lane, digest, idem = ARGV[1], ARGV[2], ARGV[3], ARGV[9], ARGV[12]
local known = redis.call('HMGET', job_key(id), 'state', 'digest')
if known[1] then
  return { known[2] == digest and 'exists' or 'taken', id }
end
if idem ~= '' then
  local holder = redis.call('GET', KEYS[9])
  if holder then
    local other, content = string.match(holder, '^(%S+) (%S*)$')
    return { content == digest and 'exists' or 'conflict', other }
  end
end
local counts = redis.call('HMGET', LOAD, 'queued', 'delayed')
local depth = tonumber(counts[1] or 0) + tonumber(counts[2] or 0)
if depth >= tonumber(ARGV[10]) then return { 'full', depth } end
local hook = ARGV[14] or ''
if hook ~= '' then
  local unmoved = redis.call('XLEN', OUTBOX)
  if unmoved >= tonumber(ARGV[15]) then return { 'outbox_full', unmoved } end
end

admit(id, payload, lane, tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]),
  tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[11]), digest, idem,
  ARGV[13] or '', hook)
if idem ~= '' then redis.call('SET', KEYS[9], id .. ' ' .. digest) end
return { 'created', id }

-- End a job that its worker cannot decode: a dead letter and a terminal error.
--
-- KEYS   as in prelude.lua
-- ARGV   1 worker   2 job id   3 epoch   4 error code   5 message   6 retention in ms
-- Reply  1 if the job is this worker's, or was ended by it (a retry), else 0 and nothing is written
-- O(1).

local worker, id, epoch, code, message = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
proceed_when_memory_is_full()

local job = read_job(id)
if not job or job.owner ~= worker or job.epoch ~= epoch then return 0 end
if job.state == 'done' then return 1 end
if job.state ~= 'running' then return 0 end
bury('undecodable', job.lane, job.entry, id, message, read_payload(job.lane, job.entry) or '', job)
finish(job, 'error', tonumber(ARGV[6]), code, message)
redis.call('HSET', job_key(id), 'owner', worker)
return 1

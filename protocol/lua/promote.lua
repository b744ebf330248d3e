-- Move delayed jobs that are due into their lanes: for a queue where no worker claims, so that an
-- autoscaler sees them.
--
-- KEYS   as in prelude.lua
-- ARGV   1 retention in ms
-- Reply  how many delayed jobs were looked at, all that were due unless one call may not move as
-- many: 128, or 16 MiB of payloads and one more. 0: none is due any more
-- O(log n) for each job.

proceed_when_memory_is_full()
return promote_due(tonumber(ARGV[1]))

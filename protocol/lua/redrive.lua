-- Submit the job of a `crashed` dead letter anew, under a new id, and remove the dead letter.
--
-- KEYS   as in prelude.lua
-- ARGV   1 entry id of the dead letter   2 new job id   3 payload under that id   4 digest of its
--        content   5 cost in tokens
-- Reply  `created` | `exists` (a retry) | `unknown` (no such dead letter)
-- O(1). A job id is never used twice, so readers of the old one keep its terminal error.

if redis.call('EXISTS', job_key(ARGV[2])) == 1 then return 'exists' end
local letter = redis.call('XRANGE', DEAD, ARGV[1], ARGV[1])[1]
if not letter or field(letter[2], 'kind') ~= 'crashed' then return 'unknown' end
local function number(name) return tonumber(field(letter[2], name)) end

admit(ARGV[2], ARGV[3], field(letter[2], 'lane'), number('prompt'), number('budget'),
  tonumber(ARGV[5]), 0, 0, number('retention'), ARGV[4], '',
  field(letter[2], 'note') or '', field(letter[2], 'hook') or '')
redis.call('XDEL', DEAD, ARGV[1])
return 'created'

-- All blocks of an inventory are written: from here on its generation counts, and the one before does not.
-- ARGV: replica, epoch, seq, token, identity, blocks, number of blocks. Returns {'ok'}, {'stale', epoch}, or {'unknown'}
-- where its beginning was lost or another inventory began.

local id, epoch, seq, token, identity, blocks, num_blocks =
  ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11], ARGV[12]
open()
local now = now_ms()
expire(now)
local found = record(id)
if found and found.epoch > epoch then return {'stale', found.epoch} end
if not found or found.pending ~= token then return {'unknown'} end
save(id, epoch, tonumber(seq), token, '-')
change_members()
redis.call('HSET', IDENTITIES, id, identity)
renew(id, now)
append(num_blocks, 'k', 'i', 'r', id, 'e', epoch, 's', seq, 'i', identity, 'b', blocks)
return {'ok'}

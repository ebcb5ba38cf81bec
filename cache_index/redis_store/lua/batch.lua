-- A batch, whose blocks are written already, takes its place in the log. In this order a snapshot may hold a batch twice,
-- in its blocks and in the log after it, which changes nothing; in the other it could miss one.
-- ARGV: replica, epoch, seq, token, token from here on (another one after a clear), events, number of blocks.
-- Returns {'ok'}, {'applied'} where it was before, {'stale', epoch}, {'unknown'}, or {'gap', expected seq}.

local id, epoch, seq, token, next_token, events, num_blocks =
  ARGV[6], ARGV[7], tonumber(ARGV[8]), ARGV[9], ARGV[10], ARGV[11], ARGV[12]
open()
local now = now_ms()
expire(now)
local found, refusal = current(id, epoch)
if not found then return refusal end
if seq <= found.seq then return {'applied'} end
if seq ~= found.seq + 1 or token ~= found.token then return {'gap', found.seq + 1} end
if next_token ~= token and next_token ~= found.pending then return {'gap', found.seq + 1} end
save(id, epoch, seq, next_token, '-')
if next_token ~= token then change_members() end
renew(id, now)
append(num_blocks, 'k', 'b', 'r', id, 'e', epoch, 's', ARGV[8], 'b', events)
return {'ok'}

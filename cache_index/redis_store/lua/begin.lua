-- An inventory is under way: its token is known before its first block is written, so that no clean-up takes it for one
-- of a generation that is gone. What counts meanwhile is what counted before, unless that was of an earlier epoch.
-- ARGV: replica, epoch, seq, token. Returns {'ok'}, {'stale', epoch}, or {'ignored'} for an older inventory.

local id, epoch, seq, token = ARGV[6], ARGV[7], tonumber(ARGV[8]), ARGV[9]
open()
local now = now_ms()
expire(now)
local found = record(id)
if found and found.epoch > epoch then return {'stale', found.epoch} end
if found and found.epoch == epoch and seq < found.seq then return {'ignored'} end
if found and found.epoch < epoch then
  depart(id)
  found = nil
end
if found then
  save(id, found.epoch, found.seq, found.token, token)
else
  save(id, epoch, 0, '-', token)
end
renew(id, now)
return {'ok'}

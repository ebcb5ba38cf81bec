-- Blocks of a generation are still being written: what takes longer than a lease must not be the end of its replica.
-- ARGV: replica, token. Where another token counts or is under way nothing changes. Returns {'ok'}.

local id, token = ARGV[6], ARGV[7]
open()
local now = now_ms()
expire(now)
local found = record(id)
if found and (found.token == token or found.pending == token) then renew(id, now) end
return {'ok'}

-- A replica signs off; one with a newer epoch is left alone. ARGV: replica, epoch.

local id, epoch = ARGV[6], ARGV[7]
open()
expire(now_ms())
local found = record(id)
if found and found.epoch <= epoch then depart(id) end
return {'ok'}

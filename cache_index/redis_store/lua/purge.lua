-- A tenant's blocks were dropped: followers and replicas are to hear of it. ARGV: tenant, purges to remember.

local tenant, purges_max = ARGV[6], tonumber(ARGV[7])
open()
-- A write that Redis allows when its memory is full, and after one it allows a script the others too: a purge gives room.
redis.call('PEXPIRE', META, KEEP_MS)
expire(now_ms())
redis.call('ZADD', PURGED, redis.call('HINCRBY', META, 'purges', 1), tenant)
redis.call('ZREMRANGEBYRANK', PURGED, 0, -purges_max - 1)
append(0, 'k', 'p', 't', tenant)
return {'ok'}

-- A replica is alive; followers hear its digest, unless it has yet to hear of a purge, until when it holds more than
-- they know, or its store is known to have drifted.
-- ARGV: replica, epoch, seq, digest, number of purges seen or -, whether followers may hear it (1 or 0).
-- Returns {'ok', number of purges, {purged tenants}, {identities of gateways}}, {'stale', epoch}, {'unknown'}, or
-- {'gap', the store's seq}.

local id, epoch, seq, digest, seen, is_news = ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11]
open()
local now = now_ms()
expire(now)
local found, refusal = current(id, epoch)
if not found then return refusal end
if tonumber(seq) ~= found.seq then return {'gap', found.seq} end
-- First, for it is a write that Redis allows when its memory is full, and after one it allows a script the others too.
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, KEEP_MS) end
renew(id, now)

local num_purges = tonumber(redis.call('HGET', META, 'purges') or '0')
local purged = {}
-- More than there were: the store lost its data, and with it what there was to tell.
if seen ~= '-' and tonumber(seen) < num_purges then
  purged = redis.call('ZRANGEBYSCORE', PURGED, '(' .. seen, '+inf')
end
if #purged == 0 and is_news == '1' then
  append(0, 'k', 'h', 'r', id, 'e', epoch, 's', seq, 'd', digest)
end

for _, fingerprint in ipairs(redis.call('ZRANGEBYSCORE', GATEWAY_LEASES, '-inf', now, 'LIMIT', 0, LAPSES_MAX)) do
  redis.call('ZREM', GATEWAY_LEASES, fingerprint)
  redis.call('HDEL', GATEWAYS, fingerprint)
end
return {'ok', num_purges, purged, redis.call('HVALS', GATEWAYS)}

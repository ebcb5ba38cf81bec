-- A gateway hashes prompts under an identity. ARGV: fingerprint, identity, how many different ones there may be.

local fingerprint, identity, identities_max = ARGV[6], ARGV[7], tonumber(ARGV[8])
open()
redis.call('HSET', GATEWAYS, fingerprint, identity)
redis.call('ZADD', GATEWAY_LEASES, now_ms() + LEASE_MS, fingerprint)
-- The ones that were not heard of for longest go first.
local surplus = redis.call('ZCARD', GATEWAY_LEASES) - identities_max
if surplus > 0 then
  for _, old in ipairs(redis.call('ZRANGE', GATEWAY_LEASES, 0, surplus - 1)) do
    redis.call('ZREM', GATEWAY_LEASES, old)
    redis.call('HDEL', GATEWAYS, old)
  end
end
return {'ok'}

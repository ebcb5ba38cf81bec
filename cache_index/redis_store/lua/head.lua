-- Where a snapshot begins: the log's last place, and who counts there.
-- Returns {version, nonce, {replica, record, identity, lease left in ms, ...}, {tenants}}.

open()
local now = now_ms()
expire(now)
local replicas = {}
local leases = redis.call('ZRANGEBYSCORE', LEASES, '(' .. now, '+inf', 'WITHSCORES')
for i = 1, #leases, 2 do
  local id = leases[i]
  replicas[#replicas + 1] = id
  replicas[#replicas + 1] = redis.call('HGET', REPLICAS, id) or ''
  replicas[#replicas + 1] = redis.call('HGET', IDENTITIES, id) or ''
  replicas[#replicas + 1] = tonumber(leases[i + 1]) - now
end
return {
  tonumber(redis.call('HGET', META, 'version')), redis.call('HGET', META, 'nonce'), replicas,
  redis.call('SMEMBERS', TENANTS),
}

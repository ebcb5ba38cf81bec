-- Lapsed leases end now, whoever asks. Returns {version, nonce}: the log's last place.

open()
expire(now_ms())
return {tonumber(redis.call('HGET', META, 'version')), redis.call('HGET', META, 'nonce')}

-- Who counts, and with which generation. KEYS: meta, replicas. Returns {what names these members, {replica, record, ...}}.

return {redis.call('HGET', KEYS[1], 'members'), redis.call('HGETALL', KEYS[2])}

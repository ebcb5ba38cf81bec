-- Whether anything changed in who counts, and whose lease has run out since. KEYS: meta, leases. Reads only, so it works
-- while Redis refuses writes. Returns {what names the present members, {replicas whose lease is over}}.

local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
return {redis.call('HGET', KEYS[1], 'members'), redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)}

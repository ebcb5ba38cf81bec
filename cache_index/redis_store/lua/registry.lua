-- Begins every script of the registry, whose keys are all in one slot. REDIS.md describes them.
--
-- A replica's record is "epoch seq token pending": the epoch as 20 digits, for it passes what a double holds, and is
-- compared as text; the token of the generation that counts, and that of an inventory under way, as 16 hex digits, or -.

local META, LOG, LEASES, REPLICAS, IDENTITIES = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local TENANTS, PURGED, GATEWAYS, GATEWAY_LEASES = KEYS[6], KEYS[7], KEYS[8], KEYS[9]

-- The same for every script: what makes this call's log ids unique, and the settings.
local NONCE, LEASE_MS, ITEMS_MAX, LOG_BLOCKS_MAX, FORMAT =
  ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
-- An index that nobody has heard of for a day is nobody's.
local KEEP_MS = 24 * 60 * 60 * 1000
-- Lapsed leases that one call tidies up; the rest wait for the next call, and count for nothing in the meantime.
local LAPSES_MAX = 16
-- Log entries after which a call trims no more. Each adds a handful at most, so the log returns to its bounds.
local TRIMMED_MAX = 128
local LAST_EPOCH = string.rep('9', 20)

-- Redis 6.2 replicates a script by its effects, which a script that asks for the time needs, only when told to.
if redis.replicate_commands then redis.replicate_commands() end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Add an item to the log under the next version. Ids are version-nonce, so that the same version of a log that lost
-- its end and was continued is told apart.
local function append(num_blocks, ...)
  local version = redis.call('HINCRBY', META, 'version', 1)
  redis.call('HSET', META, 'nonce', NONCE)
  redis.call('XADD', LOG, string.format('%.0f-%s', version, NONCE), 'n', num_blocks, ...)
  local log_blocks = redis.call('HINCRBY', META, 'log_blocks', num_blocks)
  local num_items = redis.call('XLEN', LOG)
  -- A log that somebody deleted begins anew, and so does the count of what is in it.
  if num_items == 1 then redis.call('HSET', META, 'log_blocks', num_blocks) end
  -- One more than the items that a follower may lag behind: its own place has to be there.
  if num_items <= ITEMS_MAX + 1 and log_blocks <= LOG_BLOCKS_MAX then return end
  -- Mostly one goes as one comes. Entries are read to be counted, and each is as long as its batch: so few at first.
  local num_trimmed, count = 0, 2
  while num_trimmed < TRIMMED_MAX do
    local trimmed = {}
    for _, entry in ipairs(redis.call('XRANGE', LOG, '-', '+', 'COUNT', count)) do
      if num_items == 1 or (num_items <= ITEMS_MAX + 1 and log_blocks <= LOG_BLOCKS_MAX) then break end
      trimmed[#trimmed + 1] = entry[1]
      num_items = num_items - 1
      log_blocks = log_blocks - tonumber(entry[2][2])
    end
    if #trimmed > 0 then redis.call('XDEL', LOG, unpack(trimmed)) end
    num_trimmed = num_trimmed + #trimmed
    if #trimmed < count then break end
    count = count * 4
  end
  redis.call('HSET', META, 'log_blocks', log_blocks)
end

-- Every script begins here: a namespace that is empty gets its format and the log's first entry, and one of another
-- major version is refused.
local function open()
  local format = redis.call('HGET', META, 'format')
  if not format then
    redis.call('DEL', LOG)
    redis.call('HSET', META, 'format', FORMAT, 'version', 0, 'log_blocks', 0)
    append(0, 'k', 'o')
  elseif format ~= FORMAT then
    error('WARMROUTEFORMAT ' .. format)
  end
end

local function record(id)
  local value = redis.call('HGET', REPLICAS, id)
  if not value then return nil end
  local epoch, seq, token, pending = string.match(value, '^(%d+) (%d+) (%S+) (%S+)$')
  return {epoch = epoch, seq = tonumber(seq), token = token, pending = pending}
end

local function save(id, epoch, seq, token, pending)
  redis.call('HSET', REPLICAS, id, string.format('%s %.0f %s %s', epoch, seq, token, pending))
end

local function renew(id, now)
  redis.call('ZADD', LEASES, now + LEASE_MS, id)
end

-- Who counts, or with which generation, changed. Readers that keep a copy ask for it by this name.
local function change_members()
  redis.call('HSET', META, 'members', NONCE)
end

-- A replica leaves: nothing of it counts from here on. Followers hear of it if they had heard of it before.
local function depart(id)
  local left = record(id)
  redis.call('ZREM', LEASES, id)
  redis.call('HDEL', REPLICAS, id)
  redis.call('HDEL', IDENTITIES, id)
  change_members()
  -- Where the record was lost nobody knows which epoch ended; whichever followers know did.
  if not left or left.token ~= '-' then
    append(0, 'k', 'd', 'r', id, 'e', left and left.epoch or LAST_EPOCH)
  end
end

local function expire(now)
  -- Where the leases were lost and the records were not, they begin anew: without one a replica would never leave.
  if redis.call('ZCARD', LEASES) < redis.call('HLEN', REPLICAS) then
    -- A write that Redis allows when its memory is full, and after it the others.
    redis.call('PEXPIRE', REPLICAS, KEEP_MS)
    local records = redis.call('HGETALL', REPLICAS)
    for i = 1, #records, 2 do redis.call('ZADD', LEASES, 'NX', now + LEASE_MS, records[i]) end
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, LAPSES_MAX)) do
    depart(id)
  end
end

-- The record of a replica that speaks in `epoch`, or why it may not: {'unknown'} or {'stale', current epoch}.
local function current(id, epoch)
  local found = record(id)
  if found and found.epoch > epoch then return nil, {'stale', found.epoch} end
  if not found or found.epoch < epoch or found.token == '-' then return nil, {'unknown'} end
  return found
end

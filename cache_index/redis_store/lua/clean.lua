-- One bounded step of the clean-up after generations that are gone: their bits are taken out of some of the blocks.
--
-- The first step condemns the slots, so that a late writer of such a generation gets another one, and no bit can appear
-- behind the scan. After the last the slots are free. One clean-up at a time: another that began and was given up is
-- taken over after a while.
-- ARGV: whose clean-up it is (8 bytes), cursor (0 to begin), blocks in a step, how long a clean-up may be silent in ms,
-- tokens that are gone (8 bytes each; for the first step). Returns {next cursor, blocks looked at}; cursor 0 is the end,
-- also where another's clean-up is under way, or there is nothing to clean.

local cleaner, cursor, count, silent_ms, gone = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local NOTHING = {'0', 0}

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local slots, cleaning = field('slots'), field('cleaning')
local owner, until_ms, mask = string.sub(cleaning, 1, 8), string.match(cleaning, '^(%d+) (.*)$', 9)
if cleaning ~= '' and owner ~= cleaner and tonumber(until_ms) > now then return NOTHING end

if cursor == '0' then
  local is_gone = {[CONDEMNED] = true}
  for at = 1, #gone, 8 do is_gone[string.sub(gone, at, at + 7)] = true end
  local bytes, num_kept, num_gone = {}, 0, 0
  local digests = field('digests')
  for slot = 0, #slots / 8 - 1 do
    local token = string.sub(slots, slot * 8 + 1, slot * 8 + 8)
    local byte = math.floor(slot / 8) + 1
    bytes[byte] = bytes[byte] or 0
    if is_gone[token] then
      num_gone = num_gone + 1
      bytes[byte] = bytes[byte] + 2 ^ (slot % 8)
      slots = with_entry(slots, 8, slot, CONDEMNED)
      digests = with_entry(digests, 10, slot, NO_BLOCKS)
    elseif token ~= FREE then
      num_kept = num_kept + 1
    end
  end
  if num_kept == 0 then
    -- Nobody is left in it: all of it goes at once, and Redis frees the memory beside its work.
    redis.call('UNLINK', PARTITION)
    return NOTHING
  end
  if num_gone == 0 then return NOTHING end
  mask = string.char(unpack(bytes))
  redis.call('HSET', PARTITION, 'slots', slots, 'digests', digests)
elseif owner ~= cleaner then
  return NOTHING
end

local page = redis.call('HSCAN', PARTITION, cursor, 'COUNT', count)
local changed, emptied, num_seen = {}, {}, 0
for i = 1, #page[2], 2 do
  local name, bitmap = page[2][i], page[2][i + 1]
  if #name == HASH_BYTES then
    num_seen = num_seen + 1
    local kept, is_changed = {}, false
    for at = 1, #bitmap do
      local old = string.byte(bitmap, at)
      local new = bit.band(old, bit.bnot(string.byte(mask, at) or 0))
      is_changed = is_changed or new ~= old
      kept[at] = string.char(new)
    end
    if is_changed then
      local left = string.gsub(table.concat(kept), '%z+$', '')
      if left == '' then
        emptied[#emptied + 1] = name
      else
        changed[#changed + 1] = {name, left}
      end
    end
  end
end
-- Blocks leave before any is written: Redis lets a script that has freed something write, even when its memory is full.
for first = 1, #emptied, 500 do
  redis.call('HDEL', PARTITION, unpack(emptied, first, math.min(#emptied, first + 499)))
end
for _, pair in ipairs(changed) do redis.call('HSET', PARTITION, pair[1], pair[2]) end

if page[1] ~= '0' then
  redis.call('HSET', PARTITION, 'cleaning', cleaner .. string.format('%.0f', now + silent_ms) .. ' ' .. mask)
  return {page[1], num_seen}
end
for slot = 0, #slots / 8 - 1 do
  local in_byte = string.byte(mask, math.floor(slot / 8) + 1) or 0
  if math.floor(in_byte / 2 ^ (slot % 8)) % 2 == 1 then slots = with_entry(slots, 8, slot, FREE) end
end
redis.call('HSET', PARTITION, 'slots', slots)
redis.call('HDEL', PARTITION, 'cleaning')
return {'0', num_seen}

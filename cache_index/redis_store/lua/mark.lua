-- Blocks that a generation holds from here on, and those that it no longer holds. Its slot is taken at its first block.
-- ARGV: token, how long the partition is kept in ms, slots at most, hashes to set, hashes to clear (16 bytes each).
-- Returns the digest of what the generation held before and after: {number, checksum, number, checksum}; or {'full'}.

local token, keep_ms, slots_max, to_set, to_clear = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
-- Fields in one command: what Lua's stack holds is limited.
local FIELDS_MAX = 500

local slots, digests = field('slots'), field('digests')
local slot = slot_of(slots, token)
if not slot then
  if to_set == '' then return {0, 0, 0, 0} end
  slot = slot_of(slots, FREE) or #slots / 8
  if slot >= slots_max then return {'full'} end
  redis.call('HSET', PARTITION, 'slots', with_entry(slots, 8, slot, token))
  digests = with_entry(digests, 10, slot, NO_BLOCKS)
end
local num_blocks, checksum = struct.unpack('<I4I6', entry_of(digests, 10, slot))
local before = {num_blocks, checksum}

local byte, bit = math.floor(slot / 8) + 1, 2 ^ (slot % 8)
local padding = string.rep('\0', byte)
local alone = string.rep('\0', byte - 1) .. string.char(bit)

local function is_set(bitmap)
  local found = string.byte(bitmap, byte)
  return found and math.floor(found / bit) % 2 == 1
end

local function with_bit(bitmap, change)
  bitmap = bitmap .. string.sub(padding, #bitmap + 1)
  return string.sub(bitmap, 1, byte - 1) .. string.char(string.byte(bitmap, byte) + change) .. string.sub(bitmap, byte + 1)
end

local function each_part(hashes, apply)
  for first = 1, #hashes, FIELDS_MAX * HASH_BYTES do
    local names = {}
    for at = first, math.min(#hashes, first + FIELDS_MAX * HASH_BYTES - 1), HASH_BYTES do
      names[#names + 1] = string.sub(hashes, at, at + HASH_BYTES - 1)
    end
    apply(names, redis.call('HMGET', PARTITION, unpack(names)))
  end
end

each_part(to_clear, function(names, bitmaps)
  local changed, emptied, seen = {}, {}, {}
  for i, name in ipairs(names) do
    local bitmap = bitmaps[i]
    if bitmap and not seen[name] and is_set(bitmap) then
      seen[name] = true
      num_blocks = num_blocks - 1
      -- Reduced each time: a sum of more than a few would pass 2^53, up to which Lua's numbers are exact.
      checksum = (checksum - struct.unpack('<I6', name)) % 2 ^ 48
      bitmap = string.gsub(with_bit(bitmap, -bit), '%z+$', '')
      if bitmap == '' then
        emptied[#emptied + 1] = name
      else
        changed[#changed + 1] = name
        changed[#changed + 1] = bitmap
      end
    end
  end
  if #emptied > 0 then redis.call('HDEL', PARTITION, unpack(emptied)) end
  if #changed > 0 then redis.call('HSET', PARTITION, unpack(changed)) end
end)

each_part(to_set, function(names, bitmaps)
  local changed, seen = {}, {}
  for i, name in ipairs(names) do
    local bitmap = bitmaps[i]
    if not seen[name] and not (bitmap and is_set(bitmap)) then
      seen[name] = true
      num_blocks = num_blocks + 1
      checksum = (checksum + struct.unpack('<I6', name)) % 2 ^ 48
      changed[#changed + 1] = name
      changed[#changed + 1] = bitmap and with_bit(bitmap, bit) or alone
    end
  end
  if #changed > 0 then redis.call('HSET', PARTITION, unpack(changed)) end
end)

redis.call('HSET', PARTITION, 'digests', with_entry(digests, 10, slot, struct.pack('<I4I6', num_blocks, checksum)))
redis.call('PEXPIRE', PARTITION, keep_ms)
return {before[1], before[2], num_blocks, checksum}

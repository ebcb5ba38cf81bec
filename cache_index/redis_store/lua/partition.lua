-- Begins every script of a tenant's partition. KEYS: the partition, a hash of
--
--   block hash (16 bytes)  bitmap, one bit per slot, little-endian, without zero bytes at its end
--   slots                  8 bytes per slot: the token of the generation that has it, zeros where it is free, or
--                          ones while it is being cleaned
--   digests                10 bytes per slot: number of blocks (4), checksum (6), little-endian
--   cleaning               8 bytes: whose clean-up is under way; then until when in ms; then the slots it cleans

local PARTITION = KEYS[1]
local FREE, CONDEMNED = string.rep('\0', 8), string.rep('\255', 8)
local NO_BLOCKS = string.rep('\0', 10)
local HASH_BYTES = 16

if redis.replicate_commands then redis.replicate_commands() end

local function field(name)
  return redis.call('HGET', PARTITION, name) or ''
end

-- Where a token stands in the table, from 0; nil where it doesn't.
local function slot_of(slots, token)
  local at = 1
  while true do
    at = string.find(slots, token, at, true)
    if not at then return nil end
    -- Tokens are random, so one may seem to stand across two others.
    if (at - 1) % 8 == 0 then return (at - 1) / 8 end
    at = at + 1
  end
end

-- A table with one entry replaced, or added; what should stand before it and doesn't is zeros.
local function with_entry(entries, width, slot, entry)
  entries = entries .. string.rep('\0', slot * width - #entries)
  return string.sub(entries, 1, slot * width) .. entry .. string.sub(entries, (slot + 1) * width + 1)
end

local function entry_of(entries, width, slot)
  local found = string.sub(entries, slot * width + 1, (slot + 1) * width)
  return found .. string.rep('\0', width - #found)
end

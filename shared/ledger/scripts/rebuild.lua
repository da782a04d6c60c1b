-- Begin a rebuild, or finish it. Arguments: {'begin', token, now, lock_s, force} or {'finish', token}.
-- Answers whether the caller may rebuild, or has rebuilt, the ledger.
local token = ARGS[2]

local function delete_all()
  local cursor = '0'
  repeat
    local found = call('SCAN', cursor, 'MATCH', PREFIX .. '*', 'COUNT', 1000)
    cursor = found[1]
    if #found[2] > 0 then call('UNLINK', unpack(found[2])) end
  until cursor == '0'
end

if ARGS[1] == 'finish' then
  if state[2] ~= token then return encode(false) end
  call('HSET', PREFIX .. 'ledger', 'ready', 1)
  call('HDEL', PREFIX .. 'ledger', 'rebuild_lock_until')
  quota.recount()
  fair.load_entitlements()
  return encode(true)
end

local now, lock_s, force = ARGS[3], ARGS[4], ARGS[5]
local locked_until = tonumber(call('HGET', PREFIX .. 'ledger', 'rebuild_lock_until') or 0)
if is_ready and not force then return encode(false) end
if not is_ready and state[2] and locked_until > now then return encode(false) end
delete_all()
-- Milliseconds: higher than any number that was given before what is being rebuilt was lost.
local start = math.floor(now * 1000)
call('HSET', PREFIX .. 'ledger', 'format', state.format, 'generation', token,
  'rebuild_lock_until', now + lock_s, 'version', math.max(last_version, start),
  'capacity', math.max(capacity, start), 'feed_entry', math.max(last_entry, start),
  'fence_floor', math.max(fence_floor, start))
return encode(true)

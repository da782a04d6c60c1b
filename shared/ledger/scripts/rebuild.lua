-- Begin a rebuild, or say that it is done. Arguments: {'begin', token, now, lock_s, force} or
-- {'finish', token}. Answers whether the caller won.
local token = A[2]

local function wipe()
  local cursor = '0'
  repeat
    local found = call('SCAN', cursor, 'MATCH', P .. '*', 'COUNT', 1000)
    cursor = found[1]
    if #found[2] > 0 then call('UNLINK', unpack(found[2])) end
  until cursor == '0'
end

if A[1] == 'finish' then
  if meta[2] ~= token then return pack(false) end
  call('HSET', P .. 'ledger', 'ready', 1)
  call('HDEL', P .. 'ledger', 'until')
  quota.recount()
  fair.read_rights()
  return pack(true)
end

local now, lock_s, force = A[3], A[4], A[5]
local ends_at = tonumber(call('HGET', P .. 'ledger', 'until') or 0)
if meta[1] == '1' and not force then return pack(false) end
if meta[1] ~= '1' and meta[2] and ends_at > now then return pack(false) end
wipe()
-- Milliseconds: more than any number that was handed out before what is being rebuilt was lost.
local start = math.floor(now * 1000)
call('SET', P .. 'meta', 'see ' .. P .. 'ledger, format ' .. meta.format)
call('HSET', P .. 'ledger', 'format', meta.format, 'epoch', token, 'until', now + lock_s,
  'seq', math.max(seq, start), 'capacity', math.max(capacity, start), 'feed', math.max(feed, start),
  'floor', math.max(floor, start))
return pack(true)

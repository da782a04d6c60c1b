-- Close the ledger to be rebuilt, begin a rebuild, or finish it. Arguments: {'close', generation, records as 'kind key'
-- that cannot be read}, {'begin', token, now, lock_s, force}, {'extend', token, now, lock_s} or {'finish', token}. Returns
-- whether that was done; `extend`, which extends the lock of a rebuild, whether all quotas are known.
local token = ARGS[2]
local UNREADABLE, MOST_UNREADABLE, UNREADABLE_S = PREFIX .. 'unreadable', 256, 86400

local function delete_all()
  local cursor = '0'
  repeat
    local found = call('SCAN', cursor, 'MATCH', PREFIX .. '*', 'COUNT', 1000)
    cursor = found[1]
    for _, key in ipairs(found[2]) do
      if key ~= PREFIX .. 'gone' and key ~= UNREADABLE then call('UNLINK', key) end
    end
  until cursor == '0'
end

if ARGS[1] == 'close' then
  if state[2] ~= token or not is_ready then return encode(false) end
  call('HSET', PREFIX .. 'ledger', 'ready', 0)
  for _, record in ipairs(ARGS[3]) do
    if call('HLEN', UNREADABLE) < MOST_UNREADABLE then call('HSET', UNREADABLE, record, call('TIME')[1]) end
  end
  call('EXPIRE', UNREADABLE, UNREADABLE_S)
  return encode(true)
end

if ARGS[1] == 'extend' then
  if generation ~= token or is_ready then return redis.error_reply('STALETOKEN') end
  call('HSET', PREFIX .. 'ledger', 'rebuild_lock_until', ARGS[3] + ARGS[4])
  return encode(call('HEXISTS', PREFIX .. 'ledger', 'quotas') == 1)
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
local locked_until = number_at('ledger', 'rebuild_lock_until')
if is_ready and not force then return encode(false) end
-- A lock that ends later than a new one would, by more than a second, is of a clock that was ahead.
local is_locked = locked_until > now and locked_until <= now + lock_s + 1
if not is_ready and state[2] and is_locked then return encode(false) end
local quota_count = redis.pcall('HGET', PREFIX .. 'ledger', 'quotas')
local has_quotas = tonumber(quota_count or -1) == redis.pcall('HLEN', quota.rules_key)
delete_all()
-- Milliseconds: higher than any number that was given before what is being rebuilt was lost, unless this
-- clock was behind; then the caller may know a higher one.
local start = math.max(math.floor(now * 1000), tonumber(ARGV[6]))
call('HSET', PREFIX .. 'ledger', 'format', state.format, 'generation', token,
  'rebuild_lock_until', now + lock_s, 'version', math.max(last_version, start),
  'capacity', math.max(capacity, start), 'fence_floor', math.max(fence_floor, start))
-- Without all quotas, the rebuild waits for the watcher's.
if has_quotas then
  call('HSET', PREFIX .. 'ledger', 'quotas', quota_count)
else
  call('DEL', quota.rules_key, quota.rules_key .. '-read-at')
end
return encode(true)

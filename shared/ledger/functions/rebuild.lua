-- Close the ledger to be rebuilt, begin a rebuild, or finish it. Arguments: {'close', generation, records as 'kind key'
-- that cannot be read}, {'begin', token, now, lock_s, force}, {'extend', token, now, lock_s} or {'finish',
-- token}. Returns whether that was done; `extend`, which extends the lock of a rebuild, whether all quotas are known.
local fair = require('fair')
local ledger = require('ledger')
local quota = require('quota')
local recount = require('recount')
local server = require('server')
local call, encode = redis.call, cmsgpack.pack

local function delete_all()
  local cursor = '0'
  repeat
    local found = call('SCAN', cursor, 'MATCH', server.prefix .. '*', 'COUNT', 1000)
    cursor = found[1]
    for _, key in ipairs(found[2]) do
      if key ~= server.prefix .. 'gone' and key ~= recount.unreadable_key then call('UNLINK', key) end
    end
  until cursor == '0'
end

local function close(generation, unreadable)
  if ledger.generation ~= generation or not ledger.is_ready then return false end
  call('HSET', server.prefix .. 'ledger', 'ready', 0)
  recount.remember(unreadable)
  return true
end

local function extend(token, now, lock_s)
  if ledger.generation ~= token or ledger.is_ready then return redis.error_reply('STALETOKEN') end
  call('HSET', server.prefix .. 'ledger', 'rebuild_lock_until', now + lock_s)
  return encode(call('HEXISTS', server.prefix .. 'ledger', 'quotas') == 1)
end

return function(action, token, now, lock_s, force)
  if action == 'extend' then return extend(token, now, lock_s) end
  if action == 'close' then return encode(close(token, now)) end
  if action == 'finish' then
    if ledger.generation ~= token then return encode(false) end
    call('HSET', server.prefix .. 'ledger', 'ready', 1)
    call('HDEL', server.prefix .. 'ledger', 'rebuild_lock_until')
    quota.recount()
    fair.load_entitlements()
    return encode(true)
  end

  local locked_until = server.number_at('ledger', 'rebuild_lock_until')
  if ledger.is_ready and not force then return encode(false) end
  -- A lock that ends later than a new one would, by more than a second, is of a clock that was ahead.
  local is_locked = locked_until > now and locked_until <= now + lock_s + 1
  if not ledger.is_ready and ledger.generation ~= '' and is_locked then return encode(false) end
  local quota_count = redis.pcall('HGET', server.prefix .. 'ledger', 'quotas')
  local has_quotas = tonumber(quota_count or -1) == redis.pcall('HLEN', quota.rules_key)
  delete_all()
  -- Milliseconds: higher than any number that was given before what is being rebuilt was lost, unless this
  -- clock was behind; then the caller may know a higher one.
  local start = math.max(math.floor(now * 1000), server.known_version)
  call('HSET', server.prefix .. 'ledger', 'format', ledger.FORMAT, 'generation', token,
    'rebuild_lock_until', now + lock_s, 'version', math.max(ledger.version, start),
    'capacity', math.max(ledger.capacity, start), 'fence_floor', math.max(ledger.fence_floor, start))
  -- Without all quotas, the rebuild waits for the watcher's.
  if has_quotas then
    call('HSET', server.prefix .. 'ledger', 'quotas', quota_count)
  else
    call('DEL', quota.rules_key, quota.rules_key .. '-read-at')
  end
  return encode(true)
end

-- Quotas. Arguments: {'save', QuotaRowRecords, when they were read} or
-- {'read', whether with charges}. 'save' replaces all quotas and returns whether anything changed. 'read'
-- returns quotas, what is used and what is charged, each a flat list of names and packed values.
local layouts = require('layouts')
local ledger = require('ledger')
local quota = require('quota')
local server = require('server')
local values = require('values')
local writes = require('writes')
local call, encode = redis.call, cmsgpack.pack
local R = layouts.QUOTAROW

return function(action, rows, read_at)
  if action == 'read' then
    return {call('HGETALL', quota.rules_key), call('HGETALL', server.prefix .. 'quota-used'),
      rows and call('HGETALL', server.prefix .. 'quota-charges') or {}}
  end

  local read_at_key = quota.rules_key .. '-read-at'
  -- A time ahead of ours counts as now: otherwise a clock that is wrong would block all quotas until then.
  local time = server.time()
  read_at = math.min(read_at, time[1] + time[2] / 1e6)
  if (tonumber(redis.pcall('GET', read_at_key)) or 0) > read_at then return encode(false) end
  -- A reading counts although it is older if the stored one is older than two minutes: of another host, whose
  -- clock is behind.
  call('SET', read_at_key, string.format('%.6f', read_at), 'EX', 120)

  local has_changed, before, removed = false, {}, {}
  for name, rule in values.each_pair(call('HGETALL', quota.rules_key)) do before[name], removed[name] = rule, true end
  local quotas = {}
  for _, row in ipairs(rows) do
    local namespace, value = row[R.NAMESPACE], encode(row[R.QUOTA])
    quotas[namespace], removed[namespace] = value, nil
    has_changed = has_changed or before[namespace] ~= value
  end
  has_changed = has_changed or next(removed) ~= nil
  if not has_changed then
    if ledger.generation ~= '' then quota.save_count() end
    return encode(false)
  end

  call('DEL', quota.rules_key)
  for namespace, value in pairs(quotas) do call('HSET', quota.rules_key, namespace, value) end
  if ledger.generation ~= '' then quota.save_count() end
  if ledger.is_ready then
    quota.recount()
    writes.raise_capacity('quotas')
    for namespace in pairs(quota.waiting_groups()) do
      call('HSET', server.prefix .. 'quota-freed', namespace, ledger.capacity)
      quota.offer(namespace, server.MAX_ARGS)
    end
    call('HSET', server.prefix .. 'quota-freed', '*', ledger.capacity)
  end
  return encode(true)
end

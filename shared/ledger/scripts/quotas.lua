-- Quotas. Arguments: {'save', rows of {namespace, quota (R_* in quota.lua)}, when they were read} or
-- {'read', whether with charges}. 'save' replaces all quotas and returns whether anything changed. 'read'
-- returns quotas, what is used and what is charged, each a flat list of names and packed values.
if ARGS[1] == 'read' then
  return {call('HGETALL', quota.rules_key), call('HGETALL', PREFIX .. 'quota-used'),
    ARGS[2] and call('HGETALL', PREFIX .. 'quota-charges') or {}}
end

local read_at_key = quota.rules_key .. '-read-at'
-- A time ahead of ours counts as now: otherwise a clock that is wrong would block all quotas until then.
local time = call('TIME')
local read_at = math.min(ARGS[3], time[1] + time[2] / 1e6)
if (tonumber(redis.pcall('GET', read_at_key)) or 0) > read_at then return encode(false) end
-- A reading counts although it is older if the stored one is older than two minutes: of another host, whose
-- clock is behind.
call('SET', read_at_key, string.format('%.6f', read_at), 'EX', 120)

for _, row in ipairs(ARGS[2]) do row[2] = encode(row[2]) end
local has_changed, before, removed = false, {}, {}
for name, rule in each_pair(call('HGETALL', quota.rules_key)) do before[name], removed[name] = rule, true end
for _, row in ipairs(ARGS[2]) do
  has_changed = has_changed or before[row[1]] ~= row[2]
  removed[row[1]] = nil
end
has_changed = has_changed or next(removed) ~= nil
if not has_changed then
  if generation ~= '' then quota.save_count() end
  return encode(false)
end

call('DEL', quota.rules_key)
for _, row in ipairs(ARGS[2]) do call('HSET', quota.rules_key, row[1], row[2]) end
if generation ~= '' then quota.save_count() end
if is_ready then
  quota.recount()
  raise_capacity('quotas')
  for _, group in ipairs(call('HKEYS', PREFIX .. 'waiting-groups')) do
    local namespace = quota_namespace(group)
    if namespace then
      call('HSET', PREFIX .. 'quota-freed', namespace, capacity)
      quota.offer(namespace, MAX_ARGS)
    end
  end
  call('HSET', PREFIX .. 'quota-freed', '*', capacity)
end
return encode(true)

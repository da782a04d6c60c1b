-- Quotas. Arguments: {'save', rows of {namespace, quota (R_*)}, when they were read} or {'read'}.
-- 'save' makes these all that there are and answers whether that was news; 'read' answers quotas,
-- what is held and what is charged, each a flat list of names and packed values.
if A[1] == 'read' then
  return {call('HGETALL', quota.rules_key), call('HGETALL', P .. 'held'),
    call('HGETALL', P .. 'charges')}
end

local told_key = quota.rules_key .. '-told'
-- What was read ahead of our time was read now, or a clock set wrong would bar all that is read until then.
local time = call('TIME')
local told_at = math.min(A[3], time[1] + time[2] / 1e6)
if tonumber(call('GET', told_key) or 0) > told_at then return pack(false) end
call('SET', told_key, string.format('%.3f', told_at))

for _, row in ipairs(A[2]) do row[2] = pack(row[2]) end
local before, found = {}, call('HGETALL', quota.rules_key)
for i = 1, #found, 2 do before[found[i]] = found[i + 1] end
local changed, left = false, {}
for name in pairs(before) do left[name] = true end
for _, row in ipairs(A[2]) do
  changed = changed or before[row[1]] ~= row[2]
  left[row[1]] = nil
end
changed = changed or next(left) ~= nil
if not changed then return pack(false) end

call('DEL', quota.rules_key)
for _, row in ipairs(A[2]) do call('HSET', quota.rules_key, row[1], row[2]) end
if meta[1] == '1' then
  quota.recount()
  raise_capacity('quotas')
  for _, group in ipairs(call('HKEYS', P .. 'groups')) do
    local namespace = string.match(group, '^q:([^|]*)')
    if namespace then
      call('HSET', P .. 'quota-freed', namespace, capacity)
      quota.offer(namespace, MAX_ARGS)
    end
  end
  call('HSET', P .. 'quota-freed', '*', capacity)
end
return pack(true)

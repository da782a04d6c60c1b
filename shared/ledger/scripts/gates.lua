-- Pods that wait at the budget's scheduling gate. Arguments:
--   'put', rows of {namespace, pod, text}
--   'drop', namespace, pods
--   'namespaces'        answers those that have any, each with how its budget stands (text, '': unknown)
--   'pods', namespace   answers texts
-- Keys beside the ledger's, which a rebuild leaves alone:
--   gated            set    namespaces
--   gated:NAMESPACE  hash   pod -> text
-- How budgets stand: see takings.lua.
local B = string.gsub(P, ':$', '') .. '-reclaim:'
local what = A[1]
if what == 'put' then
  for _, row in ipairs(A[2]) do
    call('SADD', B .. 'gated', row[1])
    call('HSET', B .. 'gated:' .. row[1], row[2], row[3])
  end
  return pack(true)
end
if what == 'drop' then
  for _, pod in ipairs(A[3]) do call('HDEL', B .. 'gated:' .. A[2], pod) end
  if call('EXISTS', B .. 'gated:' .. A[2]) == 0 then call('SREM', B .. 'gated', A[2]) end
  return pack(true)
end
if what == 'pods' then return pack(call('HVALS', B .. 'gated:' .. A[2])) end
local rows = {}
for i, namespace in ipairs(call('SMEMBERS', B .. 'gated')) do
  local value = call('HGET', B .. 'standings', namespace)
  rows[i] = {namespace, value and decode(value)[2] or ''}
end
return pack(rows)

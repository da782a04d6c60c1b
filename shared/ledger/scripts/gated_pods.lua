-- Pods with the scheduling gate of their namespace's budget. Arguments, by the first of them:
--   'save', rows of {namespace, pod, text}
--   'remove', namespace, pods
--   'namespaces'         returns those that have gated pods, each with the state of its budget ('': unknown)
--   'list', namespace    returns texts
-- Keys that a rebuild does not change:
--   gated            set    namespaces
--   gated:NAMESPACE  hash   pod -> text
--   budgets          see preemptions.lua
local BESIDE = string.gsub(PREFIX, ':$', '') .. '-preemption:'
local actions = {}

function actions.save(rows)
  for _, row in ipairs(rows) do
    call('SADD', BESIDE .. 'gated', row[1])
    call('HSET', BESIDE .. 'gated:' .. row[1], row[2], row[3])
  end
  return true
end

function actions.remove(namespace, pods)
  for _, pod in ipairs(pods) do call('HDEL', BESIDE .. 'gated:' .. namespace, pod) end
  if call('EXISTS', BESIDE .. 'gated:' .. namespace) == 0 then
    call('SREM', BESIDE .. 'gated', namespace)
  end
  return true
end

function actions.list(namespace)
  return call('HVALS', BESIDE .. 'gated:' .. namespace)
end

function actions.namespaces()
  local rows = {}
  for i, namespace in ipairs(call('SMEMBERS', BESIDE .. 'gated')) do
    local value = call('HGET', BESIDE .. 'budgets', namespace)
    rows[i] = {namespace, readable(value)[2] or ''}
  end
  return rows
end

return encode(actions[ARGS[1]](unpack(ARGS, 2)))

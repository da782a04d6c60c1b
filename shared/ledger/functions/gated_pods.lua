-- Pods with the scheduling gate of their namespace's budget. Arguments: an action and its arguments. `namespaces`
-- returns each with the state of its budget ('': unknown).
-- Keys that a rebuild does not change: gated (set, namespaces), gated:NAMESPACE (hash, pod -> text), and budgets: see
-- preemptions.lua
local layouts = require('layouts')
local server = require('server')
local values = require('values')
local call, encode = redis.call, cmsgpack.pack
local B = layouts.BUDGET
local STORE
server.on_begin(function() STORE = server.beside .. '-preemption:' end)
local actions = {}

function actions.save(rows)
  for _, row in ipairs(rows) do
    call('SADD', STORE .. 'gated', row[1])
    call('HSET', STORE .. 'gated:' .. row[1], row[2], row[3])
  end
  return true
end

function actions.remove(namespace, pods)
  for _, pod in ipairs(pods) do call('HDEL', STORE .. 'gated:' .. namespace, pod) end
  if call('EXISTS', STORE .. 'gated:' .. namespace) == 0 then
    call('SREM', STORE .. 'gated', namespace)
  end
  return true
end

function actions.list(namespace) return call('HVALS', STORE .. 'gated:' .. namespace) end

function actions.namespaces()
  local rows = {}
  for i, namespace in ipairs(call('SMEMBERS', STORE .. 'gated')) do
    local stored = values.record(call('HGET', STORE .. 'budgets', namespace), B)
    rows[i] = {namespace, stored and stored[B.BUDGET] or ''}
  end
  return rows
end

return function(action, ...) return encode(actions[action](...)) end

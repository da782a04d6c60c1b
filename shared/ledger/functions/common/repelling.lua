-- Pods whose required anti-affinity the watcher has not reported yet. kube-scheduler has chosen their nodes;
-- nothing that placers chose without knowledge of them may be reserved where they may repel it.
--   repelling   hash   pod -> RepellingRecord, until the watcher reports it on the node or its lease ends
local layouts = require('layouts')
local ledger = require('ledger')
local records = require('records')
local server = require('server')
local call, encode = redis.call, cmsgpack.pack
local N, P = layouts.NODE, layouts.REPELLING

local M = {}
local pods
server.on_begin(function() pods = nil end)

local function all()
  if not pods then
    pods = {}
    if ledger.repels_version then
      for pod, record in server.each_record(server.prefix .. 'repelling', P) do pods[pod] = record end
    end
  end
  return pods
end

-- The terms of those on a node, as JSON: an array of them for each pod.
function M.terms_on(name)
  local terms = {}
  for _, pod in pairs(all()) do
    if pod[P.NODE] == name then terms[#terms + 1] = pod[P.TERMS] end
  end
  return '[' .. table.concat(terms, ',') .. ']'
end

-- The nodes of those that may repel pods from other nodes.
function M.wide_nodes()
  local names = {}
  for _, pod in pairs(all()) do
    if pod[P.IS_WIDE] then names[#names + 1] = pod[P.NODE] end
  end
  return names
end

-- Whether one may repel a pod from a node, and a caller that has read up to version `known` does not know.
function M.is_unknown(name, known)
  if known < server.number_at('ledger', 'repels_floor') then return true end
  for _, pod in pairs(all()) do
    if pod[P.VERSION] > known and (pod[P.IS_WIDE] or pod[P.NODE] == name) then return true end
  end
  return false
end

-- Add a pod. Mirrors read it with the facts of its node.
function M.add(pod, version, name, is_wide, terms)
  all()[pod] = {version, name, is_wide, terms}
  call('HSET', server.prefix .. 'repelling', pod, encode(pods[pod]))
  ledger.repels_version = string.format('%.0f', version)
  call('HSET', server.prefix .. 'ledger', 'repels_version', ledger.repels_version)
  records.mark_inventory_changed(name)
end

-- Remove those of some pods that are on one of these nodes (name -> true; nil: on any); return whether there
-- were any. Those that are reported stay unknown to callers that had not read of them before.
function M.remove(some, on_nodes, are_reported)
  local has_removed = false
  for _, uid in ipairs(ledger.repels_version and some or {}) do
    local pod = all()[uid]
    if pod and (not on_nodes or on_nodes[pod[P.NODE]]) then
      has_removed, pods[uid] = true, nil
      call('HDEL', server.prefix .. 'repelling', uid)
      if are_reported then
        local floor = math.max(pod[P.VERSION], server.number_at('ledger', 'repels_floor'))
        call('HSET', server.prefix .. 'ledger', 'repels_floor', string.format('%.0f', floor))
      end
      local name = pod[P.NODE]
      local node = records.node_of(name)
      if node and node[N.STATUS] == 1 then
        records.mark_inventory_changed(name)
        -- Other nodes, or pods of namespaces that its terms do not name, may be concerned.
        if pod[P.IS_WIDE] then
          records.mark_grown(name)
          records.inventory_changes.reasons = true
        end
      end
    end
  end
  return has_removed
end

return M

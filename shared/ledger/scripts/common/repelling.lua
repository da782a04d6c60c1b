-- Pods whose required anti-affinity the watcher has not reported yet. kube-scheduler has chosen their nodes;
-- nothing that placers chose without knowledge of them may be reserved where they may repel it.
--   repelling   hash   pod -> {version of its reservation, node, whether it may repel pods on other nodes or
--                      of any namespace, its terms as JSON}, until the watcher reports it on the node or its
--                      lease ends
local repelling = {}
do -- A script may have 200 local names.
local pods

local function all()
  if not pods then
    pods = {}
    if state[12] then
      for pod, read in each_packed(PREFIX .. 'repelling') do pods[pod] = read[4] and read or nil end
    end
  end
  return pods
end

-- The terms of those on a node, as JSON: an array of them for each pod.
function repelling.terms_on(name)
  local terms = {}
  for _, pod in pairs(all()) do
    if pod[2] == name then terms[#terms + 1] = pod[4] end
  end
  return '[' .. table.concat(terms, ',') .. ']'
end

-- Whether one may repel a pod from a node, and a caller that has read up to version `known` does not know.
function repelling.is_unknown(name, known)
  if known < number_at('ledger', 'repels_floor') then return true end
  for _, pod in pairs(all()) do
    if pod[1] > known and (pod[3] or pod[2] == name) then return true end
  end
  return false
end

-- Add a pod. Mirrors read it with the facts of its node.
function repelling.add(pod, version, name, is_wide, terms)
  all()[pod] = {version, name, is_wide, terms}
  call('HSET', PREFIX .. 'repelling', pod, encode(pods[pod]))
  state[12] = string.format('%.0f', version)
  call('HSET', PREFIX .. 'ledger', 'repels_version', state[12])
  mark_inventory_changed(name)
end

-- Remove those of some pods that are on one of these nodes (name -> true; nil: on any); return whether there
-- were any. Those that are reported stay unknown to callers that had not read of them before.
function repelling.remove(some, on_nodes, are_reported)
  local has_removed = false
  for _, uid in ipairs(state[12] and some or {}) do
    local pod = all()[uid]
    if pod and (not on_nodes or on_nodes[pod[2]]) then
      has_removed, pods[uid] = true, nil
      call('HDEL', PREFIX .. 'repelling', uid)
      if are_reported then
        local floor = math.max(pod[1], number_at('ledger', 'repels_floor'))
        call('HSET', PREFIX .. 'ledger', 'repels_floor', string.format('%.0f', floor))
      end
      local node = node_of(pod[2])
      if node and node[N_STATUS] == 1 then
        mark_inventory_changed(pod[2])
        -- Other nodes, or pods of namespaces that its terms do not name, may be concerned.
        if pod[3] then
          mark_grown(pod[2])
          inventory_changes.reasons = true
        end
      end
    end
  end
  return has_removed
end
end

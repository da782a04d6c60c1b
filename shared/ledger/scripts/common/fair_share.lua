-- The order of namespaces whose pods wait: first the one with the smallest dominant share of all healthy
-- devices, divided by its weight (shared.model.fair_share). It is updated with each lease, so that no pod
-- has to be read for it.
--   used-cores, used-mib      hashes  namespace -> use of its live leases
--   node-sizes                hash    node -> {cores, MiB} of its healthy devices
--   ledger                    hash    total_cores, total_mib: of all of them; is_ordered: '0' when the
--                                     order of all groups must be rewritten
--   entitlements              hash    namespace -> {0: it has budget left, 1: it has none; its weight;
--                                     1: its budget queues new pods}
--   queue:N|NAMESPACE|GROUP   zset    order|pod, all of score 0: highest priority first, then oldest; N is
--                                     the length of the namespace
--   group-order:GROUP         zset    position|namespace, all of score 0: the queues of a group
--   queue-positions:NAMESPACE hash    group -> the namespace's entry in the group's order
local fair = {used = {}, added = {}, entitlements = {}, unit = 1}
do -- A script may have 200 local names.
local PARTS = 1e9

function fair.total_of()
  if not fair.total then
    local found = call('HMGET', PREFIX .. 'ledger', 'total_cores', 'total_mib')
    fair.total = {math.max(1, tonumber(found[1] or 0)), math.max(1, tonumber(found[2] or 0))}
  end
  return fair.total
end

local function used_by(namespace)
  if not fair.used[namespace] then
    fair.used[namespace] = {number_at('used-cores', namespace), number_at('used-mib', namespace)}
  end
  return fair.used[namespace]
end

local function entitlement_of(namespace)
  if not fair.entitlements[namespace] then
    local known = readable(call('HGET', PREFIX .. 'entitlements', namespace))
    fair.entitlements[namespace] = known[3] and known or {0, 1, 0}
  end
  return fair.entitlements[namespace]
end

-- The sort key of a pod: whether its namespace has budget left, its rank, and the namespace's dominant
-- share, with `more` {cores, MiB} added, divided by its weight.
function fair.sort_prefix(namespace, rank, more)
  local entitlement, used, total = entitlement_of(namespace), used_by(namespace), fair.total_of()
  local cores, mib = used[1], used[2]
  if more then cores, mib = cores + more[1], mib + more[2] end
  local part = math.max(cores / total[1], mib / total[2]) / entitlement[2]
  return string.format('%d%s:%015.0f', entitlement[1], rank, math.min(PARTS * part, 1e14))
end

-- The position of a waiting pod; of equal ones the oldest comes first.
function fair.position(namespace, order, more)
  return fair.sort_prefix(namespace, string.sub(order, 1, 10), more) .. ':' .. string.sub(order, 12, 25)
end

function fair.queue(namespace, group)
  return PREFIX .. 'queue:' .. #namespace .. '|' .. namespace .. '|' .. group
end

-- Update the position of a namespace's queue in the order of its group.
function fair.reorder(namespace, group)
  local positions, group_order = PREFIX .. 'queue-positions:' .. namespace, PREFIX .. 'group-order:' .. group
  local before = call('HGET', positions, group) or nil
  local first = call('ZRANGE', fair.queue(namespace, group), 0, 0)[1]
  local now = first and fair.position(namespace, first) .. '|' .. namespace
  if before == now then return end
  if before then call('ZREM', group_order, before) end
  if now then
    call('ZADD', group_order, 0, now)
    call('HSET', positions, group, now)
  else
    call('HDEL', positions, group)
  end
end

function fair.reorder_namespace(namespace)
  for _, group in ipairs(call('HKEYS', PREFIX .. 'queue-positions:' .. namespace)) do
    fair.reorder(namespace, group)
  end
end

function fair.reorder_all()
  for _, group in ipairs(call('HKEYS', PREFIX .. 'waiting-groups')) do
    for _, entry in ipairs(call('ZRANGE', PREFIX .. 'group-order:' .. group, 0, -1)) do
      fair.reorder(string.match(entry, '|(.*)$'), group)
    end
  end
  call('HSET', PREFIX .. 'ledger', 'is_ordered', '1')
end

function fair.must_wait(namespace) return entitlement_of(namespace)[3] == 1 end

-- Returns whether the budget no longer keeps new pods of the namespace waiting.
function fair.set_entitlement(namespace, is_spent, weight, must_wait)
  local value = encode({is_spent and 1 or 0, math.max(1, weight), must_wait and 1 or 0})
  if call('HGET', PREFIX .. 'entitlements', namespace) == value then return false end
  local had_to_wait = fair.must_wait(namespace)
  call('HSET', PREFIX .. 'entitlements', namespace, value)
  fair.entitlements[namespace] = nil
  fair.reorder_namespace(namespace)
  return had_to_wait and not must_wait
end

-- Set all entitlements from the budgets, which a rebuild does not change (preemptions.lua).
function fair.load_entitlements()
  for namespace, stored in each_packed(BESIDE .. '-preemption:budgets') do
    local budget = readable(stored[2], parse_json)
    fair.set_entitlement(namespace, budget.lease_class ~= 'guaranteed', budget.weight or 1,
      (budget.new_pods or 'admit') ~= 'admit')
  end
end

-- Add a lease's demand to the use of its namespace (sign 1), or subtract it (sign -1).
function fair.add_demand(namespace, demand, sign)
  local cores, mib = 0, 0
  for d = FIRST_DEVICE, demand[2], DEVICE_FIELDS do
    cores = cores + (demand[d + 5] == EXCLUSIVE and 100 or demand[d + 2])
    mib = mib + demand[d + 1]
  end
  fair.add(namespace, sign * cores, sign * mib)
end

function fair.add(namespace, cores, mib)
  local added = fair.added[namespace] or {0, 0}
  added[1], added[2] = added[1] + cores, added[2] + mib
  fair.added[namespace] = added
end

-- Cores and MiB of the node's healthy devices.
local function size_of(name)
  local node, cores, mib = node_of(name), 0, 0
  for _, uuid in ipairs(node and node[N_STATUS] == 1 and device_uuids(name) or {}) do
    local device = device_of(uuid)
    if device and device[D_STATUS] == 1 and device[D_NODE] == name then
      cores, mib = cores + 100, mib + device[D_MEMORY]
    end
  end
  return cores, mib
end

local function update_size(name)
  local before, cores, mib = readable(call('HGET', PREFIX .. 'node-sizes', name)), size_of(name)
  if not before[2] then before = {0, 0} end
  if cores == before[1] and mib == before[2] then return end
  if cores > 0 then
    call('HSET', PREFIX .. 'node-sizes', name, encode({cores, mib}))
  else
    call('HDEL', PREFIX .. 'node-sizes', name)
  end
  call('HINCRBY', PREFIX .. 'ledger', 'total_cores', string.format('%.0f', cores - before[1]))
  call('HINCRBY', PREFIX .. 'ledger', 'total_mib', string.format('%.0f', mib - before[2]))
  call('HSET', PREFIX .. 'ledger', 'is_ordered', '0')
  fair.total = nil
end

local function increase(key, namespace, amount)
  if call('HINCRBY', PREFIX .. key, namespace, string.format('%.0f', amount)) == 0 then
    call('HDEL', PREFIX .. key, namespace)
  end
end

function fair.write(changed_names)
  for name in pairs(changed_names) do update_size(name) end
  for namespace, added in pairs(fair.added) do
    increase('used-cores', namespace, added[1])
    increase('used-mib', namespace, added[2])
    fair.used[namespace], fair.added[namespace] = nil, nil
    fair.reorder_namespace(namespace)
  end
end
end

-- The order of namespaces whose pods wait: first the one with the smallest dominant share of all healthy
-- devices, divided by its weight (shared.model.budgets.fair_share). It is updated with each lease, so that no pod
-- has to be read for it.
--   used-cores, used-mib      hashes  namespace -> use of its live leases
--   node-sizes                hash    node -> SizeRecord
--   ledger                    hash    total_cores, total_mib: of all of them; is_ordered: '0' when the
--                                     order of all groups must be rewritten
--   entitlements              hash    namespace -> EntitlementRecord
--   queue:N|NAMESPACE|GROUP   zset    order|pod, all of score 0: highest priority first, then oldest; N is
--                                     the length of the namespace
--   group-order:GROUP         zset    position|namespace, all of score 0: the queues of a group
--   queue-positions:NAMESPACE hash    group -> the namespace's entry in the group's order
local constants = require('constants')
local layouts = require('layouts')
local records = require('records')
local server = require('server')
local values = require('values')
local call, encode, parse_json = redis.call, cmsgpack.pack, cjson.decode
local B, D, DEMAND = layouts.BOOKING, layouts.DEVICE, layouts.DEMAND
local E, N = layouts.ENTITLEMENT, layouts.NODE
local EXCLUSIVE = constants.EXCLUSIVE
local PARTS = 1e9

local M = {}
local used, entitlements, total
server.on_begin(function()
  M.added = {} -- namespace -> {cores, MiB} that this call has added
  used, entitlements, total = {}, {}, nil
end)

function M.total_of()
  if not total then
    local found = call('HMGET', server.prefix .. 'ledger', 'total_cores', 'total_mib')
    total = {math.max(1, tonumber(found[1] or 0)), math.max(1, tonumber(found[2] or 0))}
  end
  return total
end

local function used_by(namespace)
  if not used[namespace] then
    used[namespace] = {server.number_at('used-cores', namespace), server.number_at('used-mib', namespace)}
  end
  return used[namespace]
end

-- {namespace -> {cores, MiB}} of all live leases.
function M.used_by_all()
  local all = {}
  for position, key in ipairs({'used-cores', 'used-mib'}) do
    for namespace, amount in values.each_pair(call('HGETALL', server.prefix .. key)) do
      all[namespace] = all[namespace] or {0, 0}
      all[namespace][position] = tonumber(amount)
    end
  end
  return all
end

local function entitlement_of(namespace)
  if not entitlements[namespace] then
    local stored = values.record(call('HGET', server.prefix .. 'entitlements', namespace), E)
    entitlements[namespace] = stored or {false, 1, false}
  end
  return entitlements[namespace]
end

-- The sort key of a pod: whether its namespace has budget left, its rank, and the namespace's dominant
-- share, with `more` {cores, MiB} added, divided by its weight.
function M.sort_prefix(namespace, rank, more)
  local entitlement, own, all = entitlement_of(namespace), used_by(namespace), M.total_of()
  local cores, mib = own[1], own[2]
  if more then cores, mib = cores + more[1], mib + more[2] end
  local part = math.max(cores / all[1], mib / all[2]) / entitlement[E.WEIGHT]
  return string.format('%d%s:%015.0f', entitlement[E.IS_SPENT] and 1 or 0, rank, math.min(PARTS * part, 1e14))
end

-- The position of a waiting pod; of equal ones the oldest comes first.
function M.position(namespace, order, more)
  return M.sort_prefix(namespace, string.sub(order, 1, 10), more) .. ':' .. string.sub(order, 12, 25)
end

function M.queue(namespace, group)
  return server.prefix .. 'queue:' .. #namespace .. '|' .. namespace .. '|' .. group
end

-- Update the position of a namespace's queue in the order of its group.
function M.reorder(namespace, group)
  local positions = server.prefix .. 'queue-positions:' .. namespace
  local group_order = server.prefix .. 'group-order:' .. group
  local before = call('HGET', positions, group) or nil
  local first = call('ZRANGE', M.queue(namespace, group), 0, 0)[1]
  local now = first and M.position(namespace, first) .. '|' .. namespace
  if before == now then return end
  if before then call('ZREM', group_order, before) end
  if now then
    call('ZADD', group_order, 0, now)
    call('HSET', positions, group, now)
  else
    call('HDEL', positions, group)
  end
end

-- Update the positions of all queues of a namespace, whose share has changed: the first pod of each is the same.
function M.reorder_namespace(namespace)
  local positions, moved = 'queue-positions:' .. namespace, {}
  for group, before in values.each_pair(call('HGETALL', server.prefix .. positions)) do
    local now = M.position(namespace, string.sub(before, 2, 11) .. string.sub(before, 28, 42)) .. '|' .. namespace
    if now ~= before then
      local group_order = server.prefix .. 'group-order:' .. group
      call('ZREM', group_order, before)
      call('ZADD', group_order, 0, now)
      values.append(moved, group, now)
    end
  end
  server.call_all('HSET', positions, moved)
end

function M.reorder_all()
  for _, group in ipairs(call('HKEYS', server.prefix .. 'waiting-groups')) do
    for _, entry in ipairs(call('ZRANGE', server.prefix .. 'group-order:' .. group, 0, -1)) do
      M.reorder(string.match(entry, '|(.*)$'), group)
    end
  end
  call('HSET', server.prefix .. 'ledger', 'is_ordered', '1')
end

function M.must_wait(namespace) return entitlement_of(namespace)[E.MUST_WAIT] end

-- Returns whether the budget no longer keeps new pods of the namespace waiting.
function M.set_entitlement(namespace, is_spent, weight, must_wait)
  local value = encode({is_spent, math.max(1, weight), must_wait})
  if call('HGET', server.prefix .. 'entitlements', namespace) == value then return false end
  local had_to_wait = M.must_wait(namespace)
  call('HSET', server.prefix .. 'entitlements', namespace, value)
  entitlements[namespace] = nil
  M.reorder_namespace(namespace)
  return had_to_wait and not must_wait
end

-- Set all entitlements from the budgets, which a rebuild does not change (preemptions.lua).
function M.load_entitlements()
  for namespace, stored in server.each_record(server.beside .. '-preemption:budgets', layouts.BUDGET) do
    local budget = values.readable(stored[layouts.BUDGET.BUDGET], parse_json)
    M.set_entitlement(namespace, budget.lease_class ~= 'guaranteed', budget.weight or 1,
      (budget.new_pods or 'admit') ~= 'admit')
  end
end

local function add(namespace, cores, mib)
  local added = M.added[namespace]
  if not added then
    added = {0, 0}
    M.added[namespace] = added
  end
  added[1], added[2] = added[1] + cores, added[2] + mib
end
M.add = add

-- Add a lease's demand to the use of its namespace (sign 1), or subtract it (sign -1).
function M.add_demand(namespace, demand, sign)
  local cores, mib = 0, 0
  local bookings = demand[DEMAND.BOOKINGS]
  for i = 1, #bookings do
    local booking = bookings[i]
    cores = cores + (booking[B.SHARING] == EXCLUSIVE and 100 or booking[B.CORES_PERCENT])
    mib = mib + booking[B.MEMORY_MIB]
  end
  add(namespace, sign * cores, sign * mib)
end

-- Cores and MiB of the node's healthy devices.
local function size_of(name)
  local node, cores, mib = records.node_of(name), 0, 0
  for _, uuid in ipairs(node and node[N.STATUS] == 1 and records.device_uuids(name) or {}) do
    local device = records.device_of(uuid)
    if device and device[D.STATUS] == 1 and device[D.NODE] == name then
      cores, mib = cores + 100, mib + device[D.MEMORY_MIB]
    end
  end
  return cores, mib
end

local function update_size(name)
  local before = values.record(call('HGET', server.prefix .. 'node-sizes', name), layouts.SIZE) or {0, 0}
  local cores, mib = size_of(name)
  if cores == before[1] and mib == before[2] then return end
  if cores > 0 then
    call('HSET', server.prefix .. 'node-sizes', name, encode({cores, mib}))
  else
    call('HDEL', server.prefix .. 'node-sizes', name)
  end
  call('HINCRBY', server.prefix .. 'ledger', 'total_cores', string.format('%.0f', cores - before[1]))
  call('HINCRBY', server.prefix .. 'ledger', 'total_mib', string.format('%.0f', mib - before[2]))
  call('HSET', server.prefix .. 'ledger', 'is_ordered', '0')
  total = nil
end

-- Add up the stored sizes again, and count those of some nodes anew: {name -> true}.
function M.recount_sizes(names)
  if not next(names) then return end
  local cores, mib = 0, 0
  for _, size in server.each_record(server.prefix .. 'node-sizes', layouts.SIZE) do
    cores, mib = cores + size[layouts.SIZE.CORES], mib + size[layouts.SIZE.MEMORY_MIB]
  end
  call('HSET', server.prefix .. 'ledger', 'total_cores', string.format('%.0f', cores), 'total_mib',
    string.format('%.0f', mib))
  for name in pairs(names) do update_size(name) end
end

local function increase(key, namespace, amount)
  if call('HINCRBY', server.prefix .. key, namespace, string.format('%.0f', amount)) == 0 then
    call('HDEL', server.prefix .. key, namespace)
  end
end

function M.write(changed_names)
  for name in pairs(changed_names) do update_size(name) end
  for namespace, added in pairs(M.added) do
    increase('used-cores', namespace, added[1])
    increase('used-mib', namespace, added[2])
    used[namespace], M.added[namespace] = nil, nil
    M.reorder_namespace(namespace)
  end
end

return M

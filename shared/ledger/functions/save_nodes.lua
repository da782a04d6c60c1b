-- Write nodes' facts. Arguments: a row for each node: name; facts; the part of them that decides placement,
-- amounts aside (both as text); room ({name, allocatable less occupied, ...}); indices of excluded devices;
-- pods with required anti-affinity that kube-scheduler has placed on it; whether its pods may keep pods off other
-- nodes; revision of the node, and of its pods.
-- Returns whether anything changed, and the names of nodes whose resources are more than the ledger stores: they stay
-- as they were.
local capacity = require('capacity')
local constants = require('constants')
local layouts = require('layouts')
local records = require('records')
local repelling = require('repelling')
local server = require('server')
local values = require('values')
local writes = require('writes')
local call, encode, parse_json = redis.call, cmsgpack.pack, cjson.decode
local D, N = layouts.DEVICE, layouts.NODE

local function save_node(too_large, name, facts, rules, room, excluded, repelling_pods, has_wide_terms, revision,
    pods_revision)
  if not records.raise_node_revision(name, revision, pods_revision) then return false end
  local node = records.node_of(name)
  if records.unreadable.nodes[name] then return false end
  local stored = call('HMGET', server.prefix .. 'facts:' .. name, 'facts', 'rules', 'devices')
  local is_known = node and node[N.STATUS] == 1
  local were_reported = repelling.remove(repelling_pods, {[name] = true}, true)
  if is_known and stored[1] == facts then return were_reported end

  local has_new_rules, has_more_room = not is_known or stored[2] ~= rules, false
  local number = node and node[N.NUMBER] or records.new_node(name)[N.NUMBER]
  local changed_node = records.empty_node(name, number, 1)
  local amounts, positions = node and node[N.AMOUNTS], node and capacity.resource_positions(node) or {}
  local has_resource = {}
  if #name > constants.MOST_NAME_BYTES or not capacity.has_room_for_resources(changed_node, room) then
    too_large[#too_large + 1] = name
    return false
  end
  for i = 1, #room, 2 do
    local at = positions[room[i]]
    if is_known and room[i + 1] > (at and amounts[at] or 0) then has_more_room = true end
    capacity.add_resource(changed_node, room[i], room[i + 1], at and amounts[at + 1] or 0)
    has_resource[room[i]] = true
  end
  -- What leases use is kept, and so are the CPUs of NUMA nodes, which the node's agent reports.
  for resource, at in pairs(positions) do
    local capacity_of = string.find(resource, constants.NUMA_CPUS_PREFIX, 1, true) == 1 and amounts[at] or 0
    if not has_resource[resource] and amounts[at] < 0 then has_more_room = true end
    if not has_resource[resource] and (capacity_of > 0 or amounts[at + 1] > 0) then
      capacity.add_resource(changed_node, resource, capacity_of, amounts[at + 1])
    end
  end
  records.nodes[name] = changed_node
  call('HSET', server.prefix .. 'facts:' .. name, 'facts', facts, 'rules', rules, 'excluded_devices', encode(excluded))
  if has_wide_terms then
    call('SADD', server.prefix .. 'wide-terms', name)
  else
    call('SREM', server.prefix .. 'wide-terms', name)
  end
  records.mark_inventory_changed(name)

  -- The node's annotations may have excluded devices, or included them again.
  local is_excluded = values.set_of(excluded)
  for _, reported in ipairs(values.readable(stored[3], parse_json)) do
    local device = records.device_of(reported.uuid)
    if device and device[D.NODE] == name and device[D.STATUS] > 0 then
      device[D.STATUS] = is_excluded[reported.index] and 2 or 1
    end
  end
  if has_new_rules then
    records.mark_grown(name)
    records.inventory_changes.reasons = true
  elseif has_more_room then
    records.mark_freed(name)
  end
  return true
end

return function(...)
  local too_large, has_changes = {}, false
  for _, row in ipairs({...}) do
    if save_node(too_large, unpack(row)) then has_changes = true end
  end
  if has_changes then writes.write_changes('node changed') end
  return encode({has_changes, too_large})
end

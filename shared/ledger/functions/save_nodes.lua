-- Write nodes' facts. Arguments: a NodeFactsRecord for each node.
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
local D, F, N = layouts.DEVICE, layouts.NODEFACTS, layouts.NODE

local function save_node(too_large, row)
  local name, facts, rules, room, excluded = row[F.NAME], row[F.FACTS], row[F.RULES], row[F.ROOM],
    row[F.EXCLUDED_DEVICES]
  if not records.raise_node_revision(name, row[F.REVISION], row[F.PODS_REVISION]) then return false end
  local node = records.node_of(name)
  if records.unreadable.nodes[name] then return false end
  local stored = call('HMGET', server.prefix .. 'facts:' .. name, 'facts', 'rules', 'devices')
  local is_known = node and node[N.STATUS] == 1
  local were_reported = repelling.remove(row[F.REPELLING_PODS], {[name] = true}, true)
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
  if row[F.IS_WIDE] then
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
    if save_node(too_large, row) then has_changes = true end
  end
  if has_changes then writes.write_changes('node changed') end
  return encode({has_changes, too_large})
end

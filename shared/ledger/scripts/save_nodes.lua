-- Write nodes' facts. Arguments: a row for each node: name; facts; the part of them that decides placement,
-- amounts aside (both as text); room ({name, allocatable less occupied, ...}); indices of excluded devices;
-- pods with required anti-affinity that kube-scheduler has placed on it; revision of the node, and of its pods. Returns whether anything changed, and the names of nodes whose
-- resources are more than the ledger stores: they stay as they were.
local too_large = {}
local function save_node(name, facts, rules, room, excluded, repelling_pods, revision, pods_revision)
  if not raise_node_revision(name, revision, pods_revision) then return false end
  local node = node_of(name)
  if unreadable.nodes[name] then return false end
  local stored = call('HMGET', PREFIX .. 'facts:' .. name, 'facts', 'rules', 'devices')
  local is_known = node and node[N_STATUS] == 1
  local were_reported = repelling.remove(repelling_pods, {[name] = true}, true)
  if is_known and stored[1] == facts then return were_reported end

  local has_new_rules, has_more_room = not is_known or stored[2] ~= rules, false
  local number = node and node[N_NUMBER] or new_node(name)[N_NUMBER]
  local changed_node, positions = {0, 0, 1, number, name, ''}, node and resource_positions(node) or {}
  local has_resource = {}
  if #name > MOST_NAME_BYTES or not has_room_for_resources(changed_node, room) then
    too_large[#too_large + 1] = name
    return false
  end
  for i = 1, #room, 2 do
    local at = positions[room[i]]
    if is_known and room[i + 1] > (at and node[at] or 0) then has_more_room = true end
    add_resource(changed_node, room[i], room[i + 1], at and node[at + 1] or 0)
    has_resource[room[i]] = true
  end
  -- What leases use is kept, and so are the CPUs of NUMA nodes, which the node's agent reports.
  for resource, at in pairs(positions) do
    local capacity_of = string.find(resource, NUMA_CPUS_PREFIX, 1, true) == 1 and node[at] or 0
    if not has_resource[resource] and (capacity_of > 0 or node[at + 1] > 0) then
      add_resource(changed_node, resource, capacity_of, node[at + 1])
    end
  end
  nodes[name] = changed_node
  call('HSET', PREFIX .. 'facts:' .. name, 'facts', facts, 'rules', rules, 'excluded_devices', encode(excluded))
  mark_inventory_changed(name)

  -- The node's annotations may have excluded devices, or included them again.
  local is_excluded = set_of(excluded)
  for _, reported in ipairs(readable(stored[3], parse_json)) do
    local device = device_of(reported.uuid)
    if device and device[D_NODE] == name and device[D_STATUS] > 0 then
      device[D_STATUS] = is_excluded[reported.index] and 2 or 1
    end
  end
  if has_new_rules then
    mark_grown(name)
    inventory_changes.reasons = true
  elseif has_more_room then
    mark_freed(name)
  end
  return true
end

local has_changes = false
for _, row in ipairs(ARGS) do
  if save_node(unpack(row)) then has_changes = true end
end
if has_changes then write_changes('node changed') end
return encode({has_changes, too_large})

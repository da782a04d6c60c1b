-- Remove a node: it gets no new leases; its leases stay until they are released. Arguments: name; revision
-- of its deletion, and of its pods. Returns whether it existed and is removed.
local name = ARGS[1]
if not raise_node_revision(name, ARGS[2], ARGS[3]) then return encode(false) end
local node = node_of(name)
if not node or node[N_STATUS] == -1 then return encode(false) end
node[N_STATUS] = -1
for _, at in pairs(resource_positions(node)) do node[at] = 0 end
changed_nodes[name] = true
inventory_changes.reasons = true
changed_inventories[name] = false
for _, uuid in ipairs(device_uuids(name)) do
  local device = device_of(uuid)
  if device and device[D_NODE] == name then
    device[D_STATUS] = 0
    changed_devices[uuid] = true
  end
end
call('HDEL', PREFIX .. 'facts:' .. name, 'facts', 'rules', 'excluded_devices', 'devices', 'served',
  'reported_at', 'saved_at', 'by_agent')
call('HDEL', PREFIX .. 'cordons', name)
delete_removed_nodes()
write_changes('node removed')
return encode(true)

-- Remove a node: nothing new goes there; its leases stay until they are released. Argument: name. Answers
-- whether it was there.
local name = ARGS[1]
local node = node_of(name)
if not node or node[N_STATUS] == -1 then return encode(false) end
node[N_STATUS] = -1
for _, at in pairs(resource_positions(node)) do node[at] = 0 end
mark_changed(name)
changed_inventories[name] = false
for _, uuid in ipairs(device_uuids(name)) do
  local device = device_of(uuid)
  if device and device[D_NODE] == name then
    device[D_STATUS] = 0
    changed_devices[uuid] = true
  end
end
call('HDEL', PREFIX .. 'facts:' .. name, 'facts', 'rules', 'closed_devices', 'devices', 'served',
  'reported_at', 'by_agent')
call('HDEL', PREFIX .. 'cordons', name)
delete_removed_nodes()
write_changes('node removed')
return encode(true)

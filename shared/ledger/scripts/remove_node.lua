-- A node is gone: nothing new goes there; leases stay until they are released. Argument: name.
local name = A[1]
local node = node_of(name)
if not node or node[N_KNOWN] == -1 then return pack(false) end
node[N_KNOWN] = -1
for _, at in pairs(schema_of(node)) do node[at] = 0 end
touch_node(name)
inventories[name] = false
for _, uuid in ipairs(uuids_on(name)) do
  local device = device_of(uuid)
  if device and device[D_NODE] == name then
    device[D_OK] = 0
    changed_devices[uuid] = true
  end
end
call('HDEL', P .. 'facts:' .. name, 'facts', 'rules', 'closed', 'devices', 'served',
  'reported', 'agent')
call('HDEL', P .. 'shut', name)
drop_gone()
flush('node removed')
return pack(true)

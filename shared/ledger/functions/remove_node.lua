-- Remove a node: it gets no new leases; its leases stay until they are released. Arguments: name; revision
-- of its deletion, and of its pods. Returns whether it existed and is removed.
local capacity = require('capacity')
local layouts = require('layouts')
local records = require('records')
local server = require('server')
local writes = require('writes')
local call, encode = redis.call, cmsgpack.pack
local D, N = layouts.DEVICE, layouts.NODE

return function(name, revision, pods_revision)
  if not records.raise_node_revision(name, revision, pods_revision) then return encode(false) end
  local node = records.node_of(name)
  if not node or node[N.STATUS] == -1 then return encode(false) end
  node[N.STATUS] = -1
  for _, at in pairs(capacity.resource_positions(node)) do node[N.AMOUNTS][at] = 0 end
  records.changed_nodes[name] = true
  records.inventory_changes.reasons = true
  records.changed_inventories[name] = false
  for _, uuid in ipairs(records.device_uuids(name)) do
    local device = records.device_of(uuid)
    if device and device[D.NODE] == name then
      device[D.STATUS] = 0
      records.changed_devices[uuid] = true
    end
  end
  call('HDEL', server.prefix .. 'facts:' .. name, 'facts', 'rules', 'excluded_devices', 'devices', 'served',
    'reported_at', 'saved_at', 'by_agent')
  call('HDEL', server.prefix .. 'cordons', name)
  call('SREM', server.prefix .. 'wide-terms', name)
  writes.delete_removed_nodes()
  writes.write_changes('node removed')
  return encode(true)
end

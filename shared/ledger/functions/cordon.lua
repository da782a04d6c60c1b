-- Cordon nodes: no pod may be bound to them. Arguments: {node, reason, ...}; the reason '' uncordons.
-- Returns {node, reason, ...} of all cordoned nodes.
local layouts = require('layouts')
local records = require('records')
local server = require('server')
local values = require('values')
local writes = require('writes')
local call, encode = redis.call, cmsgpack.pack
local N = layouts.NODE

return function(changes)
  for name, reason in values.each_pair(changes) do
    local node, before = records.node_of(name), call('HGET', server.prefix .. 'cordons', name)
    if reason == '' and before then
      call('HDEL', server.prefix .. 'cordons', name)
      records.mark_grown(name)
    elseif reason ~= '' and reason ~= before and node and node[N.STATUS] == 1 then
      call('HSET', server.prefix .. 'cordons', name, reason)
    else
      name = nil
    end
    if name and node then
      records.mark_inventory_changed(name)
      records.inventory_changes.reasons = true
    end
  end
  if next(records.changed_nodes) then writes.write_changes('nodes cordoned or uncordoned') end
  return encode(call('HGETALL', server.prefix .. 'cordons'))
end

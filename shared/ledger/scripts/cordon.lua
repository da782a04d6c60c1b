-- Cordon nodes: no pod may be bound to them. Arguments: {node, reason, ...}; the reason '' uncordons.
-- Returns {node, reason, ...} of all cordoned nodes.
for name, reason in each_pair(ARGS[1]) do
  local node, before = node_of(name), call('HGET', PREFIX .. 'cordons', name)
  if reason == '' and before then
    call('HDEL', PREFIX .. 'cordons', name)
    mark_grown(name)
  elseif reason ~= '' and reason ~= before and node and node[N_STATUS] == 1 then
    call('HSET', PREFIX .. 'cordons', name, reason)
  else
    name = nil
  end
  if name and node then
    mark_inventory_changed(name)
    inventory_changes.reasons = true
  end
end
if next(changed_nodes) then write_changes('nodes cordoned or uncordoned') end
return encode(call('HGETALL', PREFIX .. 'cordons'))

-- Note which nodes no pod may be bound to now. Arguments: {node, why, ...}; '': it may be again.
-- Answers the names of all that are shut after this.
local words = A[1]
for i = 1, #words, 2 do
  local name, why = words[i], words[i + 1]
  local node, before = node_of(name), call('HGET', P .. 'shut', name)
  if why == '' and before then
    call('HDEL', P .. 'shut', name)
    grow_on(name)
  elseif why ~= '' and why ~= before and node and node[N_KNOWN] == 1 then
    call('HSET', P .. 'shut', name, why)
  else
    name = nil
  end
  if name and node then
    touch_node(name)
    inventories[name] = true
    local uuids = uuids_on(name)
    fetch('devices', uuids)
    for _, uuid in ipairs(uuids) do changed_devices[uuid] = devices[uuid] and true or nil end
  end
end
if next(changed_nodes) then flush('nodes shut or open') end
return pack(call('HKEYS', P .. 'shut'))

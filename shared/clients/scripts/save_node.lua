-- Write a node's facts. Arguments: name, facts, what of them decides placing besides amounts (both
-- as text), room (allocatable less occupied). Answers whether anything changed.
local name, facts, rules, room = A[1], A[2], A[3], A[4]
local node = node_of(name)
local stored = call('HMGET', P .. 'facts:' .. name, 'facts', 'rules')
local known = node and node[N_KNOWN] == 1
if known and stored[1] == facts then return pack(false) end

local better = not known or stored[2] ~= rules
for resource, amount in pairs(room) do
  if known and amount > (node[N_ROOM][resource] or 0) then better = true end
end
nodes[name] = {0, 1, room, node and node[N_USED] or {}}
call('HSET', P .. 'facts:' .. name, 'facts', facts, 'rules', rules)
call('SADD', P .. 'nodes', name)
touch_node(name)
inventories[name] = true
for _, uuid in ipairs(uuids_on(name)) do changed_devices[uuid] = device_of(uuid) and true or nil end
if better then free_on(name) end
flush('node changed')
return pack(true)

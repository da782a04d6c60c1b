-- Write a node's facts. Arguments: name, facts, what of them decides placing besides amounts (both
-- as text), room ({name, allocatable less
-- occupied, ...}). Answers whether anything changed.
local name, facts, rules, room = A[1], A[2], A[3], A[4]
local node = node_of(name)
local stored = call('HMGET', P .. 'facts:' .. name, 'facts', 'rules')
local known = node and node[N_KNOWN] == 1
if known and stored[1] == facts then return pack(false) end

local better = not known or stored[2] ~= rules
local written, there = {0, 1}, {}
local function put(resource, amount, used)
  there[resource] = true
  for _, part in ipairs({resource, amount, used}) do written[#written + 1] = part end
end
for i = 1, #room, 2 do
  local at = node and amounts_of(node, room[i])
  if known and room[i + 1] > (at and node[at + 1] or 0) then better = true end
  put(room[i], room[i + 1], at and node[at + 2] or 0)
end
for i = N_NAMES, node and #node or 0, 3 do
  if not there[node[i]] and node[i + 2] > 0 then put(node[i], 0, node[i + 2]) end
end
nodes[name] = written
call('HSET', P .. 'facts:' .. name, 'facts', facts, 'rules', rules)
call('SADD', P .. 'nodes', name)
touch_node(name)
inventories[name] = true
for _, uuid in ipairs(uuids_on(name)) do changed_devices[uuid] = device_of(uuid) and true or nil end
if better then free_on(name) end
flush('node changed')
return pack(true)

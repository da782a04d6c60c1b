-- Write a node's facts. Arguments: name, facts, what of them decides placing besides amounts (both
-- as text), room ({name, allocatable less occupied, ...}). Answers whether anything changed.
local name, facts, rules, room = A[1], A[2], A[3], A[4]
local node = node_of(name)
local stored = call('HMGET', P .. 'facts:' .. name, 'facts', 'rules')
local known = node and node[N_KNOWN] == 1
if known and stored[1] == facts then return pack(false) end

local better = not known or stored[2] ~= rules
local written, schema, there = {0, 1, ''}, node and schema_of(node) or {}, {}
for i = 1, #room, 2 do
  local at = schema[room[i]]
  if known and room[i + 1] > (at and node[at] or 0) then better = true end
  add_resource(written, room[i], room[i + 1], at and node[at + 1] or 0)
  there[room[i]] = true
end
for resource, at in pairs(schema) do
  if not there[resource] and node[at + 1] > 0 then
    add_resource(written, resource, 0, node[at + 1])
  end
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

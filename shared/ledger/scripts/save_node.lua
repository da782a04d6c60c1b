-- Write a node's facts. Arguments: name, facts, what of them decides placing besides amounts (both
-- as text), room ({name, allocatable less occupied, ...}), indices of closed devices, when this was
-- seen (0: unknown). Answers whether anything changed.
local name, facts, rules, room, closed, seen = A[1], A[2], A[3], A[4], A[5], A[6]
local node = node_of(name)
local stored = call('HMGET', P .. 'facts:' .. name, 'facts', 'rules', 'seen', 'devices')
local known = node and node[N_KNOWN] == 1
local seen_before = tonumber(stored[3] or 0)
if known and seen > 0 and seen < seen_before then return pack(false) end
call('HSET', P .. 'facts:' .. name, 'seen', string.format('%.6f', math.max(seen, seen_before)))
if known and stored[1] == facts then return pack(false) end

local changed, more = not known or stored[2] ~= rules, false
local number = node and node[N_NUMBER] or new_node(name)[N_NUMBER]
local fresh, schema, there = {0, 0, 1, number, name, ''}, node and schema_of(node) or {}, {}
for i = 1, #room, 2 do
  local at = schema[room[i]]
  if known and room[i + 1] > (at and node[at] or 0) then more = true end
  add_resource(fresh, room[i], room[i + 1], at and node[at + 1] or 0)
  there[room[i]] = true
end
for resource, at in pairs(schema) do
  if not there[resource] and node[at + 1] > 0 then
    add_resource(fresh, resource, 0, node[at + 1])
  end
end
nodes[name] = fresh
call('HSET', P .. 'facts:' .. name, 'facts', facts, 'rules', rules, 'closed', pack(closed))
touch_node(name)
inventories[name] = true
for _, uuid in ipairs(uuids_on(name)) do changed_devices[uuid] = device_of(uuid) and true or nil end

-- Devices that the node's annotations close or open again.
local is_closed = {}
for _, index in ipairs(closed) do is_closed[index] = true end
for _, reported in ipairs(stored[4] and parse(stored[4]) or {}) do
  local device = device_of(reported.uuid)
  if device and device[D_NODE] == name and device[D_OK] > 0 then
    device[D_OK] = is_closed[reported.index] and 2 or 1
  end
end
if changed then
  grow_on(name)
elseif more then
  free_on(name)
end
flush('node changed')
return pack(true)

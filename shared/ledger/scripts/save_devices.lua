-- Write all devices of a node. Arguments: name, devices and served resources (as text), rows of
-- {uuid, MiB, slots, ok, unit, index, mode}, {uuid, fence at least, ...}, reported_at, 1 if an agent of ours says so.
-- A device that is missing keeps what leases hold of it and takes nothing new. Answers whether anything changed.
local LATE_S = 120
local name, devices_text, served, rows, fences, reported = A[1], A[2], A[3], A[4], A[5], A[6]
local stored = call('HMGET', P .. 'facts:' .. name, 'devices', 'served', 'reported', 'closed',
  'agent')
-- One that is much older is of an agent whose clock was set back.
local older = tonumber(stored[3] or 0) - reported
if older > 0 and older < LATE_S then return pack(false) end
if stored[5] ~= tostring(A[7]) then
  call('HSET', P .. 'facts:' .. name, 'agent', A[7], 'reported', reported)
end

local before, reported_here, uuids = uuids_on(name), {}, {}
for i, row in ipairs(rows) do
  uuids[i] = row[1]
  reported_here[row[1]] = true
end
fetch('devices', uuids)
fetch('devices', before)

local function raise_fences()
  local raised = false
  for i = 1, #fences, 2 do
    local device = device_of(fences[i])
    if device and device[D_FENCE] < fences[i + 1] then
      device[D_FENCE] = fences[i + 1]
      changed_devices[fences[i]] = true
      raised = true
    end
  end
  return raised
end

if stored[1] == devices_text and stored[2] == served and #before == #uuids then
  local raised = raise_fences()
  if raised then flush('fence raised') end
  return pack(raised)
end

local function leave_other_node(uuid, other)
  local kept = {}
  for _, theirs in ipairs(uuids_on(other)) do
    if theirs ~= uuid then kept[#kept + 1] = theirs end
  end
  call('HSET', P .. 'facts:' .. other, 'uuids', pack(kept))
  if node_of(other) and nodes[other][N_KNOWN] == 1 then
    touch_node(other)
    inventories[other] = true
    for _, theirs in ipairs(kept) do
      changed_devices[theirs] = device_of(theirs) and true or nil
    end
  end
end

local closed = {}
for _, index in ipairs(stored[4] and decode(stored[4]) or {}) do closed[index] = true end
for _, row in ipairs(rows) do
  local uuid, memory, slots, ok, unit = row[1], row[2], row[3], row[4], row[5]
  local device = devices[uuid]
  if not device then
    device = new_device(uuid, name, unit, 0)
  elseif device[D_NODE] ~= name then
    leave_other_node(uuid, device[D_NODE])
  end
  if ok == 1 and closed[row[6]] then ok = 2 end
  if ok == 1 and (device[D_OK] ~= 1 or memory > device[D_MEMORY] or slots > device[D_SLOTS]
      or row[7] ~= device[D_MODE]) then
    grow_on(name)
  end
  device[D_NODE], device[D_MEMORY], device[D_SLOTS] = name, memory, slots
  device[D_OK], device[D_UNIT], device[D_MODE] = ok, unit, row[7]
  changed_devices[uuid] = true
end
for _, uuid in ipairs(before) do
  local device = devices[uuid]
  if device and not reported_here[uuid] and device[D_NODE] == name then
    if device[D_SHARES] > 0 then
      device[D_OK] = 0
      uuids[#uuids + 1] = uuid
      changed_devices[uuid] = true
    else
      floor = math.max(floor, device[D_FENCE])
      devices[uuid] = false
      call('HDEL', P .. 'devices', uuid)
    end
  end
end
raise_fences()
if stored[2] ~= served then grow_on(name) end
if not node_of(name) then new_node(name) end
touch_node(name)
inventories[name] = true
call('HSET', P .. 'facts:' .. name, 'devices', devices_text, 'served', served,
  'reported', reported, 'uuids', pack(uuids))
flush('devices reported')
return pack(true)

-- Write all devices of a node. Arguments: name; devices and served resources (as text); rows of {uuid,
-- MiB, slots, healthy, unit, index, mode}; {uuid, lowest possible fence, ...}; reported_at; 1 if our agent
-- reported this. A device that is not reported any more keeps what leases hold of it and takes nothing
-- new. Answers whether anything changed.
local MAX_LATE_S = 120
local name, devices_text, served, rows, fences, reported_at, by_agent =
  ARGS[1], ARGS[2], ARGS[3], ARGS[4], ARGS[5], ARGS[6], ARGS[7]
local stored = call('HMGET', PREFIX .. 'facts:' .. name, 'devices', 'served', 'reported_at',
  'closed_devices', 'by_agent')
-- A report that is much older comes from an agent whose clock was set back.
local late_s = tonumber(stored[3] or 0) - reported_at
if late_s > 0 and late_s < MAX_LATE_S then return encode(false) end
if stored[5] ~= tostring(by_agent) then
  call('HSET', PREFIX .. 'facts:' .. name, 'by_agent', by_agent, 'reported_at', reported_at)
end

local uuids_before, is_reported, uuids = device_uuids(name), {}, {}
for i, row in ipairs(rows) do
  uuids[i] = row[1]
  is_reported[row[1]] = true
end
fetch('devices', uuids)
fetch('devices', uuids_before)

local function raise_fences()
  local has_raised = false
  for i = 1, #fences, 2 do
    local device = device_of(fences[i])
    if device and device[D_FENCE] < fences[i + 1] then
      device[D_FENCE] = fences[i + 1]
      changed_devices[fences[i]] = true
      has_raised = true
    end
  end
  return has_raised
end

if stored[1] == devices_text and stored[2] == served and #uuids_before == #uuids then
  local has_raised = raise_fences()
  if has_raised then write_changes('fence raised') end
  return encode(has_raised)
end

local function remove_from_other_node(uuid, other)
  local remaining = {}
  for _, theirs in ipairs(device_uuids(other)) do
    if theirs ~= uuid then remaining[#remaining + 1] = theirs end
  end
  call('HSET', PREFIX .. 'facts:' .. other, 'uuids', encode(remaining))
  if node_of(other) and nodes[other][N_STATUS] == 1 then mark_inventory_changed(other) end
end

local is_closed = {}
for _, index in ipairs(stored[4] and decode(stored[4]) or {}) do is_closed[index] = true end
for _, row in ipairs(rows) do
  local uuid, memory, slots, status, unit, index, mode = unpack(row)
  local device = devices[uuid]
  if not device then
    device = new_device(uuid, name, unit, 0)
  elseif device[D_NODE] ~= name then
    remove_from_other_node(uuid, device[D_NODE])
  end
  if status == 1 and is_closed[index] then status = 2 end
  if status == 1 and (device[D_STATUS] ~= 1 or memory > device[D_MEMORY] or slots > device[D_SLOTS]
      or mode ~= device[D_MODE]) then
    mark_grown(name)
  end
  device[D_NODE], device[D_MEMORY], device[D_SLOTS] = name, memory, slots
  device[D_STATUS], device[D_UNIT], device[D_MODE] = status, unit, mode
  changed_devices[uuid] = true
end
for _, uuid in ipairs(uuids_before) do
  local device = devices[uuid]
  if device and not is_reported[uuid] and device[D_NODE] == name then
    if device[D_SHARES] > 0 then
      device[D_STATUS] = 0
      uuids[#uuids + 1] = uuid
      changed_devices[uuid] = true
    else
      fence_floor = math.max(fence_floor, device[D_FENCE])
      devices[uuid] = false
      call('HDEL', PREFIX .. 'devices', uuid)
    end
  end
end
raise_fences()
if stored[2] ~= served then mark_grown(name) end
if not node_of(name) then new_node(name) end
mark_changed(name)
changed_inventories[name] = true
call('HSET', PREFIX .. 'facts:' .. name, 'devices', devices_text, 'served', served,
  'reported_at', reported_at, 'uuids', encode(uuids))
write_changes('devices reported')
return encode(true)

-- Write all devices of nodes. Arguments: a row for each node: name; devices and served resources (as text);
-- rows of {uuid, MiB, slots, healthy, unit, index, mode, what is held beyond leases}; {uuid, lowest possible fence, ...}; reported_at; 1
-- if our agent sent the report. A device that is not reported any more keeps its leases and gets no new ones.
-- Returns false if nothing changed and nothing was refused, or {uuid, node, other node, ...} of devices that
-- a node reports as healthy, and that stay with another node.
local MAX_LATE_S, RECENT_S = 120, 20
local time, elsewhere = call('TIME'), {}

-- Whether a node that is there reports the device: it has not moved. An agent also reports devices that it
-- remembers, and the driver does not list; the code of a fault may follow the state of the device.
local function is_reported_by(name, uuid)
  local node = node_of(name)
  if not node or node[N_STATUS] == -1 then return false end
  for _, device in ipairs(parse_json(call('HGET', PREFIX .. 'facts:' .. name, 'devices') or '[]')) do
    if device.uuid == uuid then
      return device.healthy or not IS_MISSING[string.match(device.fault, '^%l*:? ?(%w+)')]
    end
  end
  return false
end

-- Whether the numbers of a reported device can be stored, and counted.
local function is_storable(row)
  local uuid, memory, slots, _, unit = unpack(row)
  return #uuid > 0 and #uuid <= MOST_NAME_BYTES and memory >= 0 and memory <= MOST_MIB
    and slots >= 0 and slots <= MOST_SLOT and unit >= 1 and unit <= MOST_MIB
end

-- CPUs that the kubelet can give to containers on each NUMA node, where it aligns them with devices.
local function numa_cpus(devices_text)
  local cpus = {}
  if string.find(devices_text, '"numa_cpus":%d') then
    for _, device in ipairs(parse_json(devices_text)) do
      local numa = tonumber(device.numa)
      if numa then cpus[NUMA_CPUS_PREFIX .. numa] = tonumber(device.numa_cpus) end
    end
  end
  return cpus
end

-- Store them as capacities of the node, of which leases take their part.
local function save_numa_cpus(name, cpus)
  local node = node_of(name) or new_node(name)
  for resource, at in pairs(resource_positions(node)) do
    if string.find(resource, NUMA_CPUS_PREFIX, 1, true) == 1 then
      local now = cpus[resource] or 0
      if now > node[at] then mark_freed(name) end
      node[at], cpus[resource] = now, nil
    end
  end
  for resource, now in pairs(cpus) do
    if has_room_for_resources(node, {resource, now}) then
      if now > 0 then mark_freed(name) end
      add_resource(node, resource, now, 0)
    end
  end
end

local function save_report(name, devices_text, served, reported_rows, fences, reported_at, by_agent)
  local rows = {}
  for _, row in ipairs(reported_rows) do
    if is_storable(row) then rows[#rows + 1] = row end
  end
  local stored = call('HMGET', PREFIX .. 'facts:' .. name, 'devices', 'served', 'reported_at',
    'excluded_devices', 'by_agent', 'saved_at')
  -- A report that is a little older than one saved a moment ago was delivered late. Any other older one counts:
  -- its host's clock was set back, or was ahead before.
  local late_s = tonumber(stored[3] or 0) - reported_at
  local since_s = time[1] - tonumber(stored[6] or 0)
  if late_s > 0 and late_s < MAX_LATE_S and since_s >= 0 and since_s < RECENT_S then return false end
  if stored[5] ~= tostring(by_agent) then
    call('HSET', PREFIX .. 'facts:' .. name, 'by_agent', by_agent, 'reported_at', reported_at, 'saved_at', time[1])
  end

  -- A device on which another node has leases stays with that node, and so does one that it reports, too: any
  -- agent can report any device. So does any device that this node only remembers.
  local uuids_before, is_reported, uuids = device_uuids(name), {}, {}
  for i, row in ipairs(rows) do uuids[i] = row[1] end
  fetch('devices', uuids)
  fetch('devices', uuids_before)
  node_of(name)
  if next(unreadable.devices) or next(unreadable.nodes) then return false end
  uuids = {}
  local is_stored = true
  for _, row in ipairs(rows) do
    local device = device_of(row[1])
    local is_ours = not device or device[D_NODE] == name
    if not is_ours and row[4] == 1 then
      is_ours = device[D_SHARES] == 0 and not is_reported_by(device[D_NODE], row[1])
      if not is_ours then
        append(elsewhere, row[1], name, device[D_NODE])
      end
    end
    if is_ours then
      uuids[#uuids + 1] = row[1]
      is_reported[row[1]] = true
      is_stored = is_stored and device and device[D_NODE] == name and (device[D_STATUS] == 0) == (row[4] == 0)
    end
  end

  local function raise_fences()
    local has_raised = false
    for uuid, fence in each_pair(fences) do
      local device = device_of(uuid)
      if device and device[D_NODE] == name and device[D_FENCE] < fence and fence <= highest_number(time) then
        device[D_FENCE] = fence
        changed_devices[uuid] = true
        has_raised = true
      end
    end
    return has_raised
  end

  if is_stored and stored[1] == devices_text and stored[2] == served and #uuids_before == #uuids then
    return raise_fences()
  end

  save_numa_cpus(name, numa_cpus(devices_text))

  local is_excluded = set_of(readable(stored[4]))
  local function save_device(uuid, memory, slots, status, unit, index, mode, held)
    local device = devices[uuid]
    if not device then
      device = new_device(uuid, name, unit, 0)
    elseif device[D_NODE] ~= name then
      move_device(device, name)
    end
    if status == 1 and is_excluded[index] then status = 2 end
    if status == 1 and (device[D_STATUS] ~= 1 or memory > device[D_MEMORY] or slots > device[D_SLOTS]
        or mode ~= device[D_MODE]) then
      mark_grown(name)
    elseif device[D_HELD] ~= held then
      mark_freed(name)
    end
    device[D_MEMORY], device[D_SLOTS] = memory, slots
    device[D_STATUS], device[D_UNIT], device[D_MODE], device[D_HELD] = status, unit, mode, held
    changed_devices[uuid] = true
  end
  for _, row in ipairs(rows) do
    if is_reported[row[1]] then save_device(unpack(row)) end
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
  changed_nodes[name] = true
  inventory_changes.reasons = true
  changed_inventories[name] = true
  call('HSET', PREFIX .. 'facts:' .. name, 'devices', devices_text, 'served', served,
    'reported_at', reported_at, 'saved_at', time[1], 'uuids', encode(uuids))
  return true
end

local has_changes = false
for _, row in ipairs(ARGS) do
  if save_report(unpack(row)) then has_changes = true end
end
if has_changes then write_changes('devices reported') end
return encode((has_changes or #elsewhere > 0) and elsewhere)

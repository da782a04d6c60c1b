-- Write all devices of nodes. Arguments: a DeviceReportRecord for each node. A device that is not reported any more
-- keeps its leases and its claim, and gets no new ones.
-- Returns false if nothing changed and nothing was refused, or {uuid, node, other node, ...} of devices that
-- a node reports as healthy, and that stay with another node.
local capacity = require('capacity')
local constants = require('constants')
local layouts = require('layouts')
local ledger = require('ledger')
local records = require('records')
local server = require('server')
local values = require('values')
local writes = require('writes')
local call, encode, parse_json = redis.call, cmsgpack.pack, cjson.decode
local D, N, R = layouts.DEVICE, layouts.NODE, layouts.REPORTEDDEVICE
local REPORT = layouts.DEVICEREPORT
local MAX_LATE_S, RECENT_S = 120, 20
local time, elsewhere -- of this call: the server's time; {uuid, node, other node, ...}

-- Whether a node that is there reports the device: it has not moved. An agent also reports devices that it
-- remembers, and the driver does not list; the code of a fault may follow the state of the device.
local function is_reported_by(name, uuid)
  local node = records.node_of(name)
  if not node or node[N.STATUS] == -1 then return false end
  for _, device in ipairs(parse_json(call('HGET', server.prefix .. 'facts:' .. name, 'devices') or '[]')) do
    if device.uuid == uuid then
      return device.healthy or not constants.IS_MISSING[string.match(device.fault, '^%l*:? ?(%w+)')]
    end
  end
  return false
end

-- Whether the numbers of a reported device can be stored, and counted.
local function is_storable(row)
  local uuid, memory, slots, unit = row[R.UUID], row[R.MEMORY_MIB], row[R.SLOTS], row[R.UNIT_MIB]
  return #uuid > 0 and #uuid <= constants.MOST_NAME_BYTES and memory >= 0 and memory <= constants.MOST_MIB
    and slots >= 0 and slots <= constants.MOST_SLOT and unit >= 1 and unit <= constants.MOST_MIB
end

-- CPUs that the kubelet can give to containers on each NUMA node, where it aligns them with devices.
local function numa_cpus(devices_text)
  local cpus = {}
  if string.find(devices_text, '"numa_cpus":%d') then
    for _, device in ipairs(parse_json(devices_text)) do
      local numa = tonumber(device.numa)
      if numa then cpus[constants.NUMA_CPUS_PREFIX .. numa] = tonumber(device.numa_cpus) end
    end
  end
  return cpus
end

-- Store them as capacities of the node, of which leases take their part.
local function save_numa_cpus(name, cpus)
  local node = records.node_of(name) or records.new_node(name)
  local amounts = node[N.AMOUNTS]
  for resource, at in pairs(capacity.resource_positions(node)) do
    if string.find(resource, constants.NUMA_CPUS_PREFIX, 1, true) == 1 then
      local now = cpus[resource] or 0
      if now > amounts[at] then records.mark_freed(name) end
      amounts[at] = now
      cpus[resource] = nil
    end
  end
  for resource, now in pairs(cpus) do
    if capacity.has_room_for_resources(node, {resource, now}) then
      if now > 0 then records.mark_freed(name) end
      capacity.add_resource(node, resource, now, 0)
    end
  end
end

local function save_report(report)
  local name, devices_text, served = report[REPORT.NODE], report[REPORT.DEVICES], report[REPORT.SERVED]
  local fences, reported_at, by_agent = report[REPORT.FENCES], report[REPORT.REPORTED_AT], report[REPORT.BY_AGENT]
  local rows = {}
  for _, row in ipairs(report[REPORT.ROWS]) do
    if is_storable(row) then rows[#rows + 1] = row end
  end
  local stored = call('HMGET', server.prefix .. 'facts:' .. name, 'devices', 'served', 'reported_at',
    'excluded_devices', 'by_agent', 'saved_at')
  -- A report that is a little older than one saved a moment ago was delivered late. Any other older one counts:
  -- its host's clock was set back, or was ahead before.
  local late_s = tonumber(stored[3] or 0) - reported_at
  local since_s = time[1] - tonumber(stored[6] or 0)
  if late_s > 0 and late_s < MAX_LATE_S and since_s >= 0 and since_s < RECENT_S then return false end
  if stored[5] ~= tostring(by_agent) then
    call('HSET', server.prefix .. 'facts:' .. name, 'by_agent', by_agent, 'reported_at', reported_at,
      'saved_at', time[1])
  end

  -- A device on which another node has leases stays with that node, and so does one that it reports, too: any
  -- agent can report any device. So does any device that this node only remembers.
  local uuids_before, is_reported, uuids = records.device_uuids(name), {}, {}
  for i, row in ipairs(rows) do uuids[i] = row[R.UUID] end
  records.fetch('devices', uuids)
  records.fetch('devices', uuids_before)
  records.node_of(name)
  if next(records.unreadable.devices) or next(records.unreadable.nodes) then return false end
  uuids = {}
  local is_stored = true
  for _, row in ipairs(rows) do
    local uuid, is_healthy = row[R.UUID], row[R.IS_HEALTHY]
    local device = records.device_of(uuid)
    local is_ours = not device or device[D.NODE] == name
    if not is_ours and is_healthy then
      is_ours = device[D.SHARES] == 0 and not is_reported_by(device[D.NODE], uuid)
      if not is_ours then
        values.append(elsewhere, uuid, name, device[D.NODE])
      end
    end
    if is_ours then
      uuids[#uuids + 1] = uuid
      is_reported[uuid] = true
      is_stored = is_stored and device and device[D.NODE] == name and device[D.MEMORY_MIB] == row[R.MEMORY_MIB]
        and (device[D.STATUS] ~= 0) == is_healthy
    end
  end

  local function raise_fences()
    local has_raised = false
    for uuid, fence in values.each_pair(fences) do
      local device = records.device_of(uuid)
      if device and device[D.NODE] == name and device[D.FENCE] < fence and fence <= ledger.highest_number(time) then
        device[D.FENCE] = fence
        records.changed_devices[uuid] = true
        has_raised = true
      end
    end
    return has_raised
  end

  if is_stored and stored[1] == devices_text and stored[2] == served and #uuids_before == #uuids then
    return raise_fences()
  end

  save_numa_cpus(name, numa_cpus(devices_text))

  local is_excluded = values.set_of(values.readable(stored[4]))
  local function save_device(row)
    local uuid, memory, slots, is_mig, held = row[R.UUID], row[R.MEMORY_MIB], row[R.SLOTS], row[R.IS_MIG], row[R.HELD]
    local device, status = records.devices[uuid], row[R.IS_HEALTHY] and 1 or 0
    if not device then
      device = records.new_device(uuid, name, row[R.UNIT_MIB], 0)
    elseif device[D.NODE] ~= name then
      records.move_device(device, name)
    end
    if status == 1 and is_excluded[row[R.INDEX]] then status = 2 end
    if status == 1 and (device[D.STATUS] ~= 1 or memory > device[D.MEMORY_MIB] or slots > device[D.SLOTS]
        or is_mig ~= device[D.IS_MIG]) then
      records.mark_grown(name)
    elseif device[D.HELD] ~= held then
      records.mark_freed(name)
    end
    device[D.MEMORY_MIB], device[D.SLOTS] = memory, slots
    device[D.STATUS], device[D.UNIT_MIB], device[D.IS_MIG], device[D.HELD] = status, row[R.UNIT_MIB], is_mig, held
    records.changed_devices[uuid] = true
  end
  for _, row in ipairs(rows) do
    if is_reported[row[R.UUID]] then save_device(row) end
  end
  for _, uuid in ipairs(uuids_before) do
    local device = records.devices[uuid]
    if device and not is_reported[uuid] and device[D.NODE] == name then
      if device[D.SHARES] > 0 or device[D.IS_CLAIMED] then
        device[D.STATUS] = 0
        uuids[#uuids + 1] = uuid
        records.changed_devices[uuid] = true
      else
        ledger.fence_floor = math.max(ledger.fence_floor, device[D.FENCE])
        records.devices[uuid] = false
        call('HDEL', server.prefix .. 'devices', uuid)
      end
    end
  end
  raise_fences()
  if stored[2] ~= served then records.mark_grown(name) end
  records.changed_nodes[name] = true
  records.inventory_changes.reasons = true
  records.changed_inventories[name] = true
  call('HSET', server.prefix .. 'facts:' .. name, 'devices', devices_text, 'served', served,
    'reported_at', reported_at, 'saved_at', time[1], 'uuids', encode(uuids))
  return true
end

return function(...)
  time, elsewhere = server.time(), {}
  local has_changes = false
  for _, row in ipairs({...}) do
    if save_report(row) then has_changes = true end
  end
  if has_changes then writes.write_changes('devices reported') end
  return encode((has_changes or #elsewhere > 0) and elsewhere)
end

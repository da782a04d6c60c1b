-- Restore leases found in the cluster, with their slots and fences, unless they would over-commit a
-- device. Arguments: token ('' while ready); now; seconds by which the rebuild's lock is extended; start
-- and end of each lease in server.tail; per lease whether only its node's agent knows it: then a device that
-- another node has stays there, and the lease begins now, as its namespace is charged from its beginning. Returns
-- per lease '', or why it was not written.
local capacity = require('capacity')
local constants = require('constants')
local fair = require('fair')
local gone_pods = require('gone_pods')
local layouts = require('layouts')
local lease = require('lease')
local ledger = require('ledger')
local quota = require('quota')
local records = require('records')
local server = require('server')
local tenures = require('tenures')
local values = require('values')
local waiting = require('waiting')
local writes = require('writes')
local call, encode = redis.call, cmsgpack.pack
local D, L = layouts.DEVICE, lease.L

local time, newest_s, restored_tenures -- of this call: the server's time, the latest of it and the caller's

-- Add a device that the node has not reported, or that another node has reported, to the lease's node.
local function add_device(uuid, node)
  local device = records.device_of(uuid)
  if device and device[D.NODE] == node then return end
  if device then
    records.move_device(device, node)
  else
    records.new_device(uuid, node, 1, 0)
  end
  local uuids = records.device_uuids(node)
  uuids[#uuids + 1] = uuid
  call('HSET', server.prefix .. 'facts:' .. node, 'uuids', encode(uuids))
  if device then records.mark_inventory_changed(node) end
end

-- Why the ledger cannot count on from the lease's numbers, or nil.
local function beyond_count(header, grants)
  local version, highest = header[L.VERSION], ledger.highest_number(time)
  if not (version >= 0 and version <= highest) then return 'version ' .. version end
  for s = 2, #grants, 2 do
    if not (grants[s] >= 0 and grants[s] <= highest) then return 'fence ' .. grants[s] end
  end
end

-- Why the lease conflicts with those that are there, or nil.
local function conflict(demand, grants, groups_text, resources, hearsay)
  local node = records.node_of(demand[1])
  if records.unreadable.nodes[demand[1]] then return 'record-unreadable' end
  if #demand[1] > constants.MOST_NAME_BYTES or node and not capacity.has_room_for_resources(node, resources) then
    return 'record-size of node ' .. string.sub(demand[1], 1, 253)
  end
  for i = 2, #resources, 2 do
    if not (resources[i] >= 0 and resources[i] <= constants.MOST_AMOUNT) then return 'resource:' .. resources[i - 1] end
  end
  for d, uuid, device in capacity.each_device(demand) do
    local memory, cores, _, _, policy, _, layout = unpack(demand, d + 1, d + 7)
    if records.unreadable.devices[uuid] then return 'record-unreadable' end
    if not (memory >= 0 and memory <= constants.MOST_MIB) then return 'memory' end
    if not (cores >= 0 and cores <= 100) then return 'cores' end
    if device then
      local is_elsewhere = device[D.NODE] ~= demand[1]
      if is_elsewhere and (device[D.SHARES] > 0 or hearsay) then return 'device-moved' end
      local most = device[D.MEMORY_MIB] > 0 and device[D.MEMORY_MIB] or constants.MOST_MIB
      if device[D.USED_MIB] + memory > most then return 'memory' end
      if device[D.USED_CORES] + cores > 100 then return 'cores' end
      if policy == constants.EXCLUSIVE and device[D.SHARES] > 0 then return 'not-idle' end
      if device[D.EXCLUSIVE] then return 'in-exclusive-use' end
      if device[D.USED_CORES] >= 100 and policy ~= constants.BEST_EFFORT then return 'in-exclusive-use' end
      if device[D.SHARES] > 0 and device[D.LAYOUT] ~= layout then return 'layout' end
      if capacity.has_group(device, groups_text) then return 'anti-affinity' end
      if not capacity.has_room_for_text(device, #groups_text + 2) then return 'record-size of ' .. uuid end
    end
  end
  for _, device, slot in capacity.each_share(demand, grants) do
    if slot > constants.MOST_SLOT or device and slot >= 0 and capacity.is_slot_used(device, slot) then
      return 'slot ' .. slot
    end
  end
end

-- When it became active; later than that where nobody knows any more.
local function active_since(header)
  return header[L.EXPIRES] > 0 and math.min(header[L.EXPIRES], newest_s) or newest_s
end

local function restore(value, header, demand, grants, pod, hearsay)
  local node = records.node_of(demand[1]) or records.new_node(demand[1])
  for _, uuid in capacity.each_device(demand) do add_device(uuid, demand[1]) end
  for _, device, slot, fence in capacity.each_share(demand, grants) do
    if slot >= 0 then capacity.set_slot(device, slot, '1') end
    device[D.FENCE] = math.max(device[D.FENCE], fence)
  end
  ledger.version = math.max(ledger.version, header[L.VERSION])
  header[L.CREATED] = hearsay and newest_s or math.min(header[L.CREATED], newest_s)
  if header[L.STATE] == constants.ACTIVE then header[L.EXPIRES] = hearsay and newest_s or active_since(header) end
  value = records.put_header(pod, header, value)
  local groups_text, resources, _, gang, namespace = lease.description_of(header, value)
  fair.add_demand(namespace, demand, 1)
  capacity.add_demand(demand, resources, groups_text, 1)
  capacity.index_lease(pod, node, header[L.STATE] == constants.RESERVED and header[L.EXPIRES] or 0, gang)
  if ledger.has_quotas then quota.charge_lease(pod, header, value) end
  if header[L.STATE] ~= constants.RESERVED then values.append(restored_tenures, pod, value) end
end

-- The pod has a lease already: advance it to the state and the version of this one, if the life cycle allows it.
local function merge(known_value, header, demand, grants, pod)
  local known = lease.header_of(known_value)
  local known_demand = lease.demand_of(known, known_value)
  local device, fence = lease.first_grant(demand, grants)
  local known_device, known_fence = lease.first_grant(known_demand, lease.grants_of(known, known_value))
  if known_demand[1] ~= demand[1] or known_device ~= device or known_fence ~= fence then
    return 'the pod has another lease'
  end
  local state_before, state = known[L.STATE], header[L.STATE]
  local is_newer = state_before == state and state ~= constants.RESERVED and header[L.VERSION] > known[L.VERSION]
  if is_newer or constants.MAY_REACH[state_before][state] then
    -- The lease may skip states.
    if state ~= state_before then known[L.EXPIRES] = state == constants.ACTIVE and active_since(header) or 0 end
    known[L.STATE] = state
    known[L.VERSION] = math.max(ledger.next_version(), header[L.VERSION])
    ledger.version = known[L.VERSION]
    local value = records.put_header(pod, known, known_value)
    if state_before == constants.RESERVED then tenures.append('held', {pod, value}) end
  end
  return ''
end

return function(token, now, lock_s, bounds, is_hearsay)
  restored_tenures = {}
  time = server.time()
  newest_s = math.max(now, time[1] + time[2] / 1e6)
  if not ledger.is_ready then
    if ledger.generation ~= token then return redis.error_reply('STALETOKEN') end
    call('HSET', server.prefix .. 'ledger', 'rebuild_lock_until', now + lock_s)
  end

  local given, pods, names, uuids = {}, {}, {}, {}
  for i = 1, #bounds - 1 do
    local value = string.sub(server.tail, bounds[i] + 1, bounds[i + 1])
    local header = lease.header_of(value)
    local demand = lease.demand_of(header, value)
    local _, _, pod = lease.description_of(header, value)
    given[i] = {value, header, demand}
    pods[i], names[i] = pod, demand[1]
    for d = lease.FIRST_DEVICE, demand[2], lease.DEVICE_FIELDS do uuids[#uuids + 1] = demand[d] end
  end
  records.fetch('leases', pods)
  records.fetch('nodes', names)
  records.fetch('devices', uuids)

  local answer, restored_pods = {}, {}
  for i, pod in ipairs(pods) do
    local value, header, demand = unpack(given[i])
    local grants, groups_text, resources = lease.grants_of(header, value), lease.description_of(header, value)
    local known = records.lease_of(pod)
    answer[i] = beyond_count(header, grants)
    if known and not answer[i] then
      answer[i] = merge(known, header, demand, grants, pod)
    elseif not answer[i] and records.unreadable.leases[pod] then
      answer[i] = 'record-unreadable'
    elseif not answer[i] and ledger.is_ready and gone_pods.among({pod})[pod] then
      answer[i] = 'the pod is gone'
    elseif not answer[i] then
      answer[i] = conflict(demand, grants, groups_text, resources, is_hearsay[i]) or ''
      if answer[i] == '' then
        restore(value, header, demand, grants, pod, is_hearsay[i])
        restored_pods[#restored_pods + 1] = pod
      end
    end
  end
  waiting.remove_waiting(restored_pods)
  tenures.append('restored', restored_tenures)
  if #records.written_leases > 0 then writes.write_changes('restored') end
  return encode(answer)
end

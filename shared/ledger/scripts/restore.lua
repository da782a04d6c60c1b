-- Restore leases found in the cluster, with their slots and fences, unless they would over-commit a
-- device. Arguments: token ('' while ready); now; seconds by which the rebuild's lock is extended; start
-- and end of each lease in ARGV[5]; per lease whether only its node's agent knows it: then a device that
-- another node has stays there, and the lease begins now, as its namespace is charged from its beginning. Returns
-- per lease '', or why it was not written.
local token, now, lock_s, bounds, is_hearsay = ARGS[1], ARGS[2], ARGS[3], ARGS[4], ARGS[5]
local time = call('TIME')
local newest_s = math.max(now, time[1] + time[2] / 1e6)
if not is_ready then
  if generation ~= token then return redis.error_reply('STALETOKEN') end
  call('HSET', PREFIX .. 'ledger', 'rebuild_lock_until', now + lock_s)
end

-- Add a device that the node has not reported, or that another node has reported, to the lease's node.
local function add_device(uuid, node)
  local device = device_of(uuid)
  if device and device[D_NODE] == node then return end
  if device then
    move_device(device, node)
  else
    new_device(uuid, node, 1, 0)
  end
  local uuids = device_uuids(node)
  uuids[#uuids + 1] = uuid
  call('HSET', PREFIX .. 'facts:' .. node, 'uuids', encode(uuids))
  if device then mark_inventory_changed(node) end
end

-- Why the ledger cannot count on from the lease's numbers, or nil.
local function beyond_count(header, grants)
  local version, highest = header[L_VERSION], highest_number(time)
  if not (version >= 0 and version <= highest) then return 'version ' .. version end
  for s = 2, #grants, 2 do
    if not (grants[s] >= 0 and grants[s] <= highest) then return 'fence ' .. grants[s] end
  end
end

-- Why the lease conflicts with those that are there, or nil.
local function conflict(demand, grants, groups_text, resources, hearsay)
  local node = node_of(demand[1])
  if unreadable.nodes[demand[1]] then return 'record-unreadable' end
  if #demand[1] > MOST_NAME_BYTES or node and not has_room_for_resources(node, resources) then
    return 'record-size of node ' .. string.sub(demand[1], 1, 253)
  end
  for i = 2, #resources, 2 do
    if not (resources[i] >= 0 and resources[i] <= MOST_AMOUNT) then return 'resource:' .. resources[i - 1] end
  end
  for d, uuid, device in each_device(demand) do
    local memory, cores, _, _, policy, _, layout = unpack(demand, d + 1, d + 7)
    if unreadable.devices[uuid] then return 'record-unreadable' end
    if not (memory >= 0 and memory <= MOST_MIB) then return 'memory' end
    if not (cores >= 0 and cores <= 100) then return 'cores' end
    if device then
      local is_elsewhere = device[D_NODE] ~= demand[1]
      if is_elsewhere and (device[D_SHARES] > 0 or hearsay) then return 'device-moved' end
      local most = device[D_MEMORY] > 0 and device[D_MEMORY] or MOST_MIB
      if device[D_MEMORY_USED] + memory > most then return 'memory' end
      if device[D_CORES_USED] + cores > 100 then return 'cores' end
      if policy == EXCLUSIVE and device[D_SHARES] > 0 then return 'not-idle' end
      if device[D_EXCLUSIVE] % 2 == 1 then return 'in-exclusive-use' end
      if device[D_CORES_USED] >= 100 and policy ~= BEST_EFFORT then return 'in-exclusive-use' end
      if device[D_SHARES] > 0 and device[D_LAYOUT] ~= layout then return 'layout' end
      if has_group(device, groups_text) then return 'anti-affinity' end
      if not has_room_for_text(device, #groups_text + 2) then return 'record-size of ' .. uuid end
    end
  end
  for _, device, slot in each_share(demand, grants) do
    if slot > MOST_SLOT or device and slot >= 0 and is_slot_used(device, slot) then
      return 'slot ' .. slot
    end
  end
end

-- When it became active; later than that where nobody knows any more.
local function active_since(header)
  return header[L_EXPIRES] > 0 and math.min(header[L_EXPIRES], newest_s) or newest_s
end

local restored_tenures = {}
local function restore(value, header, demand, grants, pod, hearsay)
  local node = node_of(demand[1]) or new_node(demand[1])
  for _, uuid in each_device(demand) do add_device(uuid, demand[1]) end
  for _, device, slot, fence in each_share(demand, grants) do
    if slot >= 0 then set_slot(device, slot, '1') end
    device[D_FENCE] = math.max(device[D_FENCE], fence)
  end
  last_version = math.max(last_version, header[L_VERSION])
  header[L_CREATED] = hearsay and newest_s or math.min(header[L_CREATED], newest_s)
  if header[L_STATE] == ACTIVE then header[L_EXPIRES] = hearsay and newest_s or active_since(header) end
  value = put_header(pod, header, value)
  local groups_text, resources, _, gang, namespace = description_of(header, value)
  fair.add_demand(namespace, demand, 1)
  add_demand(demand, resources, groups_text, 1)
  index_lease(pod, node, header[L_STATE] == RESERVED and header[L_EXPIRES] or 0, gang)
  if quota.on then quota.charge_lease(pod, header, value) end
  if header[L_STATE] ~= RESERVED then append(restored_tenures, pod, value) end
end

-- The pod has a lease already: advance it to the state and the version of this one, if the life cycle allows it.
local function merge(known_value, header, demand, grants, pod)
  local known = header_of(known_value)
  local known_demand = demand_of(known, known_value)
  local device, fence = first_grant(demand, grants)
  local known_device, known_fence = first_grant(known_demand, grants_of(known, known_value))
  if known_demand[1] ~= demand[1] or known_device ~= device or known_fence ~= fence then
    return 'the pod has another lease'
  end
  local state_before, state = known[L_STATE], header[L_STATE]
  local is_newer = state_before == state and state ~= RESERVED and header[L_VERSION] > known[L_VERSION]
  if is_newer or MAY_REACH[state_before][state] then
    -- The lease may skip states.
    if state ~= state_before then known[L_EXPIRES] = state == ACTIVE and active_since(header) or 0 end
    known[L_STATE] = state
    known[L_VERSION] = math.max(next_version(), header[L_VERSION])
    last_version = known[L_VERSION]
    local value = put_header(pod, known, known_value)
    if state_before == RESERVED then append_tenures('held', {pod, value}) end
  end
  return ''
end

local given, pods, names, uuids = {}, {}, {}, {}
for i = 1, #bounds - 1 do
  local value = string.sub(ARGV[5], bounds[i] + 1, bounds[i + 1])
  local header = header_of(value)
  local demand = demand_of(header, value)
  local _, _, pod = description_of(header, value)
  given[i] = {value, header, demand}
  pods[i], names[i] = pod, demand[1]
  for d = FIRST_DEVICE, demand[2], DEVICE_FIELDS do uuids[#uuids + 1] = demand[d] end
end
fetch('leases', pods)
fetch('nodes', names)
fetch('devices', uuids)

local answer, restored_pods = {}, {}
for i, pod in ipairs(pods) do
  local value, header, demand = unpack(given[i])
  local grants, groups_text, resources = grants_of(header, value), description_of(header, value)
  local known = lease_of(pod)
  answer[i] = beyond_count(header, grants)
  if answer[i] then
    -- The lease is not written.
  elseif known then
    answer[i] = merge(known, header, demand, grants, pod)
  elseif unreadable.leases[pod] then
    answer[i] = 'record-unreadable'
  elseif is_ready and gone_pods.among({pod})[pod] then
    answer[i] = 'the pod is gone'
  else
    answer[i] = conflict(demand, grants, groups_text, resources, is_hearsay[i]) or ''
    if answer[i] == '' then
      restore(value, header, demand, grants, pod, is_hearsay[i])
      restored_pods[#restored_pods + 1] = pod
    end
  end
end
remove_waiting(restored_pods)
append_tenures('restored', restored_tenures)
if #written_leases > 0 then write_changes('restored') end
return encode(answer)

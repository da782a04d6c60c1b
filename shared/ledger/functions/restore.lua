-- Restore leases found in the cluster, with their slots and fences, unless they would over-commit a
-- device. Arguments: token ('' while ready); now; seconds by which the rebuild's lock is extended; start
-- and end of each lease in server.tail; per lease whether only its node's agent knows it: then a device that
-- another node has stays there, and the lease begins now, as its namespace is charged from its beginning; and
-- records to be written anew, rows of {kind, key, node}, of the ready ledger whose generation is the token: the leases
-- among them are those given. Returns per lease '', or why it was not written.
local capacity = require('capacity')
local constants = require('constants')
local gone_pods = require('gone_pods')
local layouts = require('layouts')
local lease = require('lease')
local ledger = require('ledger')
local quota = require('quota')
local records = require('records')
local recount = require('recount')
local server = require('server')
local tenures = require('tenures')
local values = require('values')
local waiting = require('waiting')
local writes = require('writes')
local call, encode = redis.call, cmsgpack.pack
local B, D, DEMAND = layouts.BOOKING, layouts.DEVICE, layouts.DEMAND
local NUMBERS, REQUEST = layouts.NUMBERS, layouts.REQUEST

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
local function beyond_count(numbers)
  local version, grants, highest = numbers[NUMBERS.VERSION], numbers[NUMBERS.GRANTS], ledger.highest_number(time)
  if not (version >= 0 and version <= highest) then return 'version ' .. version end
  for s = 2, #grants, 2 do
    if not (grants[s] >= 0 and grants[s] <= highest) then return 'fence ' .. grants[s] end
  end
end

-- Why the lease conflicts with those that are there, or nil. Unlike a reservation it may be on a device that is
-- unhealthy, or has fewer slots than before: it runs there.
local function conflict(of_pod, hearsay)
  local demand, groups_text = of_pod.demand, of_pod.request[REQUEST.GROUPS]
  local resources, name = lease.resources_of(of_pod.request), demand[DEMAND.NODE]
  local node = records.node_of(name)
  if records.unreadable.nodes[name] then return 'record-unreadable' end
  if #name > constants.MOST_NAME_BYTES or node and not capacity.has_room_for_resources(node, resources) then
    return 'record-size of node ' .. string.sub(name, 1, 253)
  end
  for i = 2, #resources, 2 do
    if not (resources[i] >= 0 and resources[i] <= constants.MOST_AMOUNT) then return 'resource:' .. resources[i - 1] end
  end
  for booking, device in capacity.each_device(demand) do
    local uuid, memory, cores, _, _, policy, _, layout, mode = unpack(booking)
    if records.unreadable.devices[uuid] then return 'record-unreadable' end
    if not (memory >= 0 and memory <= constants.MOST_MIB) then return 'memory' end
    if not (cores >= 0 and cores <= 100) then return 'cores' end
    if device then
      local is_elsewhere = device[D.NODE] ~= name
      if is_elsewhere and (device[D.SHARES] > 0 or hearsay) then return 'device-moved' end
      local most = device[D.MEMORY_MIB] > 0 and device[D.MEMORY_MIB] or constants.MOST_MIB
      if device[D.USED_MIB] + memory > most then return 'memory' end
      if device[D.USED_CORES] + cores > 100 then return 'cores' end
      if policy == constants.EXCLUSIVE and device[D.SHARES] > 0 then return 'not-idle' end
      if device[D.EXCLUSIVE] then return 'in-exclusive-use' end
      if device[D.USED_CORES] >= 100 and policy ~= constants.BEST_EFFORT then return 'in-exclusive-use' end
      if device[D.SHARES] > 0 and device[D.LAYOUT] ~= layout then return 'layout' end
      if device[D.SHARES] > 0 and device[D.MODE] ~= mode then return 'sharing-mode' end
      if capacity.has_group(device, groups_text) then return 'anti-affinity' end
      if not capacity.has_room_for_text(device, #groups_text + 2) then return 'record-size of ' .. uuid end
    end
  end
  for _, device, slot in capacity.each_share(demand, of_pod.numbers[NUMBERS.GRANTS]) do
    if slot > constants.MOST_SLOT or device and slot >= 0 and capacity.is_slot_used(device, slot) then
      return 'slot ' .. slot
    end
  end
end

-- When it became active; later than that where nobody knows any more.
local function active_since(numbers)
  local activated_at = numbers[NUMBERS.ACTIVATED_AT]
  return activated_at > 0 and math.min(activated_at, newest_s) or newest_s
end

local function restore(of_pod, pod, hearsay)
  local numbers, demand = of_pod.numbers, of_pod.demand
  local name, state = demand[DEMAND.NODE], numbers[NUMBERS.STATE]
  if not records.node_of(name) then records.new_node(name) end
  for booking in capacity.each_device(demand) do add_device(booking[B.DEVICE], name) end
  ledger.version = math.max(ledger.version, numbers[NUMBERS.VERSION])
  numbers[NUMBERS.CREATED_AT] = hearsay and newest_s or math.min(numbers[NUMBERS.CREATED_AT], newest_s)
  if state == constants.ACTIVE then numbers[NUMBERS.ACTIVATED_AT] = hearsay and newest_s or active_since(numbers) end
  lease.update(of_pod)
  records.put_lease(pod, of_pod)
  recount.add_lease(pod, of_pod, state == constants.RESERVED and numbers[NUMBERS.EXPIRES_AT] or 0)
  if ledger.has_quotas then quota.charge_lease(pod, of_pod) end
  if state ~= constants.RESERVED then values.append(restored_tenures, pod, of_pod.value) end
end

-- The pod has a lease already: advance it to the state and the version of this one, if the life cycle allows it.
local function merge(known, of_pod, pod)
  local device, fence = lease.first_grant(of_pod)
  local known_device, known_fence = lease.first_grant(known)
  if known.demand[DEMAND.NODE] ~= of_pod.demand[DEMAND.NODE] or known_device ~= device or known_fence ~= fence then
    return 'the pod has another lease'
  end
  local before, now = known.numbers, of_pod.numbers
  local state_before, state = before[NUMBERS.STATE], now[NUMBERS.STATE]
  local is_newer = state_before == state and state ~= constants.RESERVED
    and now[NUMBERS.VERSION] > before[NUMBERS.VERSION]
  if is_newer or constants.MAY_REACH[state_before][state] then
    -- The lease may skip states.
    if state ~= state_before then
      before[NUMBERS.EXPIRES_AT] = 0
      before[NUMBERS.ACTIVATED_AT] = state == constants.ACTIVE and active_since(now) or 0
    end
    before[NUMBERS.STATE] = state
    before[NUMBERS.VERSION] = math.max(ledger.next_version(), now[NUMBERS.VERSION])
    ledger.version = before[NUMBERS.VERSION]
    lease.update(known)
    records.put_lease(pod, known)
    if state_before == constants.RESERVED then tenures.append('held', {pod, known.value}) end
  end
  return ''
end

return function(token, now, lock_s, bounds, is_hearsay, damaged)
  restored_tenures = {}
  time = server.time()
  newest_s = math.max(now, time[1] + time[2] / 1e6)
  if (not ledger.is_ready or #damaged > 0) and ledger.generation ~= token then
    return redis.error_reply('STALETOKEN')
  end
  if #damaged > 0 then recount.without(damaged) end
  if not ledger.is_ready then
    call('HSET', server.prefix .. 'ledger', 'rebuild_lock_until', now + lock_s)
  end

  local given, pods, names, uuids = {}, {}, {}, {}
  for i = 1, #bounds - 1 do
    local of_pod = lease.read(string.sub(server.tail, bounds[i] + 1, bounds[i + 1]))
    given[i] = of_pod
    pods[i], names[i] = of_pod.request[REQUEST.POD], of_pod.demand[DEMAND.NODE]
    capacity.append_uuids(uuids, of_pod.demand)
  end
  records.fetch('leases', pods)
  records.fetch('nodes', names)
  records.fetch('devices', uuids)

  local answer, restored_pods = {}, {}
  for i, pod in ipairs(pods) do
    local of_pod, known = given[i], records.lease_of(pod)
    answer[i] = beyond_count(of_pod.numbers)
    if known and not answer[i] then
      answer[i] = merge(known, of_pod, pod)
    elseif not answer[i] and records.unreadable.leases[pod] then
      answer[i] = 'record-unreadable'
    elseif not answer[i] and ledger.is_ready and gone_pods.among({pod})[pod] then
      answer[i] = 'the pod is gone'
    elseif not answer[i] then
      answer[i] = conflict(of_pod, is_hearsay[i]) or ''
      if answer[i] == '' then
        restore(of_pod, pod, is_hearsay[i])
        restored_pods[#restored_pods + 1] = pod
      end
    end
  end
  waiting.remove_waiting(restored_pods)
  tenures.append('restored', restored_tenures)
  if #damaged > 0 or #records.written_leases > 0 then writes.write_changes('restored') end
  return encode(answer)
end

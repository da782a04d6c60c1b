-- End leases and free their capacity. Arguments: {'released', pods, the version that the caller read or
-- false, reason} or {'expired', now, maximum number of groups}. A group is the pods of one `reserve`.
-- If a reservation is released of a gang that has no bound pod, all reservations of the gang end.
-- Returns whether there may be more, and the ended leases.
local capacity = require('capacity')
local claims = require('claims')
local constants = require('constants')
local fair = require('fair')
local layouts = require('layouts')
local lease = require('lease')
local ledger = require('ledger')
local quota = require('quota')
local records = require('records')
local repelling = require('repelling')
local server = require('server')
local journal = require('tenures')
local values = require('values')
local waiting = require('waiting')
local writes = require('writes')
local call, encode = redis.call, cmsgpack.pack
local D, DEMAND, NUMBERS, REQUEST = layouts.DEVICE, layouts.DEMAND, layouts.NUMBERS, layouts.REQUEST

local to_state, is_ending, ending, names, uuids, leaving_gang -- of this call

local function end_lease(pod, of_pod)
  is_ending[pod] = true
  ending[#ending + 1] = pod
  names[#names + 1] = of_pod.demand[DEMAND.NODE]
  capacity.append_uuids(uuids, of_pod.demand)
end

local function free_lease(pod, of_pod)
  local demand, request = of_pod.demand, of_pod.request
  fair.add_demand(request[REQUEST.NAMESPACE], demand, -1)
  if request[REQUEST.GANG] ~= '' then leaving_gang[#leaving_gang + 1] = request[REQUEST.GANG] .. '|' .. pod end
  local resources, groups_text = lease.resources_of(request), request[REQUEST.GROUPS]
  capacity.add_demand(demand, resources, groups_text, -1)
  for _, device, slot in capacity.each_share(demand, of_pod.numbers[NUMBERS.GRANTS]) do
    if device and slot >= 0 then capacity.set_slot(device, slot, '0') end
    if device then device[D.SLOT_MAP] = string.gsub(device[D.SLOT_MAP], '0+$', '') end
  end
  records.mark_freed(demand[DEMAND.NODE])
  if ledger.has_quotas then quota.release(pod) end
  lease.change_state(of_pod, to_state)
  records.leases[pod] = false
end

-- End all reservations of gangs of which a reservation ends and no pod is bound.
local function end_short_gangs(short_gangs)
  for gang in pairs(short_gangs) do
    for _, pod in ipairs(waiting.reserved_gang(gang)) do
      local of_pod = records.leases[pod]
      if of_pod and not is_ending[pod] then end_lease(pod, of_pod) end
    end
  end
end

local function write_ended(cause)
  server.call_all('HDEL', 'leases', ending)
  server.call_all('ZREM', 'lease-nodes', ending)
  server.call_all('SREM', 'vanished', ending)
  server.call_all('ZREM', 'silent', ending)
  repelling.remove(ending)
  server.call_all('ZREM', 'gang-leases', leaving_gang)
  for _, entry in ipairs(leaving_gang) do
    local gang = string.match(entry, '^([^|]*)|')
    if waiting.first_of_gang(gang) then waiting.mark_gang_changed(gang) end
  end
  writes.delete_removed_nodes()
  claims.reserve_freed(names)
  writes.write_changes(cause)
end

return function(to, pods_or_now, version_or_most, reason)
  local pods, cause, groups = pods_or_now, to, {}
  to_state = to == 'expired' and constants.EXPIRED or constants.RELEASED
  is_ending, ending, names, uuids, leaving_gang = {}, {}, {}, {}, {}
  if to_state == constants.EXPIRED then
    groups = call('ZRANGEBYSCORE', server.prefix .. 'expiring', '-inf', pods_or_now, 'LIMIT', 0, version_or_most)
    pods = {}
    for _, group in ipairs(groups) do
      local reservations = values.record(group, layouts.EXPIRING)
      for _, pod in ipairs(reservations and reservations[layouts.EXPIRING.PODS] or {}) do pods[#pods + 1] = pod end
    end
  else
    cause = to .. ': ' .. reason
  end

  local function ends(numbers)
    if not constants.MAY_BECOME[numbers[NUMBERS.STATE]][to_state] then return false end
    if to_state == constants.EXPIRED then return numbers[NUMBERS.EXPIRES_AT] <= pods_or_now end
    return not version_or_most or numbers[NUMBERS.VERSION] == version_or_most
  end

  local short_gangs = {}
  records.fetch('leases', pods)
  for _, pod in ipairs(pods) do
    local of_pod = records.leases[pod]
    if of_pod and not is_ending[pod] and ends(of_pod.numbers) then
      if to_state == constants.RELEASED and of_pod.numbers[NUMBERS.STATE] == constants.RESERVED then
        local gang = of_pod.request[REQUEST.GANG]
        if gang ~= '' then short_gangs[gang] = true end
      end
      end_lease(pod, of_pod)
    end
  end
  end_short_gangs(short_gangs)
  records.fetch('nodes', names)
  records.fetch('devices', uuids)

  local answer = {encode(to_state == constants.EXPIRED and #groups == version_or_most)}
  local tenures = {}
  for _, pod in ipairs(ending) do
    local of_pod = records.leases[pod]
    local state_before = of_pod.numbers[NUMBERS.STATE]
    free_lease(pod, of_pod)
    answer[#answer + 1] = of_pod.value
    if state_before ~= constants.RESERVED then values.append(tenures, pod, of_pod.value) end
  end
  if #ending > 0 then write_ended(cause) end
  journal.append('ended', tenures)
  if #groups > 0 then call('ZREM', server.prefix .. 'expiring', unpack(groups)) end
  return answer
end

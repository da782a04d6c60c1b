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
local D, L = layouts.DEVICE, lease.L

local to_state, headers, demands, ending, names, uuids, leaving_gang -- of this call

local function end_lease(pod, header, value)
  local demand = lease.demand_of(header, value)
  headers[pod], demands[pod] = header, demand
  ending[#ending + 1] = pod
  names[#names + 1] = demand[1]
  for d = lease.FIRST_DEVICE, demand[2], lease.DEVICE_FIELDS do uuids[#uuids + 1] = demand[d] end
end

local function free_lease(pod, header, demand, value)
  local groups_text, resources, _, gang, namespace = lease.description_of(header, value)
  fair.add_demand(namespace, demand, -1)
  if gang ~= '' then leaving_gang[#leaving_gang + 1] = gang .. '|' .. pod end
  capacity.add_demand(demand, resources, groups_text, -1)
  for _, device, slot in capacity.each_share(demand, lease.grants_of(header, value)) do
    if device and slot >= 0 then capacity.set_slot(device, slot, '0') end
    if device then device[D.SLOT_MAP] = string.gsub(device[D.SLOT_MAP], '0+$', '') end
  end
  records.mark_freed(demand[1])
  if ledger.has_quotas then quota.release(pod) end
  lease.change_state(header, to_state)
  records.leases[pod] = false
  return lease.with_header(header, value)
end

-- End all reservations of gangs of which a reservation ends and no pod is bound.
local function end_short_gangs(short_gangs)
  for gang in pairs(short_gangs) do
    for _, pod in ipairs(waiting.reserved_gang(gang)) do
      local value = records.leases[pod]
      if value and not headers[pod] then end_lease(pod, lease.header_of(value), value) end
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
  headers, demands, ending, names, uuids, leaving_gang = {}, {}, {}, {}, {}, {}
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

  local function ends(header)
    if not constants.MAY_BECOME[header[L.STATE]][to_state] then return false end
    if to_state == constants.EXPIRED then return header[L.EXPIRES] <= pods_or_now end
    return not version_or_most or header[L.VERSION] == version_or_most
  end

  local short_gangs = {}
  records.fetch('leases', pods)
  for _, pod in ipairs(pods) do
    local value = records.leases[pod]
    local header = value and lease.header_of(value)
    if header and not headers[pod] and ends(header) then
      if to_state == constants.RELEASED and header[L.STATE] == constants.RESERVED then
        local _, _, _, gang = lease.description_of(header, value)
        if gang ~= '' then short_gangs[gang] = true end
      end
      end_lease(pod, header, value)
    end
  end
  end_short_gangs(short_gangs)
  records.fetch('nodes', names)
  records.fetch('devices', uuids)

  local answer = {encode(to_state == constants.EXPIRED and #groups == version_or_most)}
  local tenures = {}
  for _, pod in ipairs(ending) do
    local state_before = headers[pod][L.STATE]
    local value = free_lease(pod, headers[pod], demands[pod], records.leases[pod])
    answer[#answer + 1] = value
    if state_before ~= constants.RESERVED then values.append(tenures, pod, value) end
  end
  if #ending > 0 then write_ended(cause) end
  journal.append('ended', tenures)
  if #groups > 0 then call('ZREM', server.prefix .. 'expiring', unpack(groups)) end
  return answer
end

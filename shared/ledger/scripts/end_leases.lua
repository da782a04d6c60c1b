-- End leases and free their capacity. Arguments: {'released', pods, the version that the caller read or
-- false, reason} or {'expired', now, maximum number of groups}. A group is the pods of one `reserve`.
-- If a reservation is released of a gang that has no bound pod, all reservations of the gang end.
-- Returns whether there may be more, and the ended leases.
local to = ARGS[1]
local to_state = to == 'expired' and EXPIRED or RELEASED
local pods, cause, groups = ARGS[2], to, {}
if to_state == EXPIRED then
  groups = call('ZRANGEBYSCORE', PREFIX .. 'expiring', '-inf', ARGS[2], 'LIMIT', 0, ARGS[3])
  pods = {}
  for _, group in ipairs(groups) do
    for _, pod in ipairs(readable(group)[2] or {}) do pods[#pods + 1] = pod end
  end
else
  cause = to .. ': ' .. ARGS[4]
end

local function ends(header)
  if not MAY_BECOME[header[L_STATE]][to_state] then return false end
  if to_state == EXPIRED then return header[L_EXPIRES] <= ARGS[2] end
  return not ARGS[3] or header[L_VERSION] == ARGS[3]
end

local headers, demands, ending, names, uuids, short_gangs = {}, {}, {}, {}, {}, {}
local function end_lease(pod, header, value)
  local demand = demand_of(header, value)
  headers[pod], demands[pod] = header, demand
  ending[#ending + 1] = pod
  names[#names + 1] = demand[1]
  for d = FIRST_DEVICE, demand[2], DEVICE_FIELDS do uuids[#uuids + 1] = demand[d] end
end

fetch('leases', pods)
for _, pod in ipairs(pods) do
  local value = leases[pod]
  local header = value and header_of(value)
  if header and not headers[pod] and ends(header) then
    if to_state == RELEASED and header[L_STATE] == RESERVED then
      local _, _, _, gang = description_of(header, value)
      if gang ~= '' then short_gangs[gang] = true end
    end
    end_lease(pod, header, value)
  end
end
for gang in pairs(short_gangs) do
  for _, pod in ipairs(reserved_gang(gang)) do
    if leases[pod] and not headers[pod] then end_lease(pod, header_of(leases[pod]), leases[pod]) end
  end
end
fetch('nodes', names)
fetch('devices', uuids)

local leaving_gang = {}

local function free_lease(pod, header, demand, value)
  local groups_text, resources, _, gang, namespace = description_of(header, value)
  fair.add_demand(namespace, demand, -1)
  if gang ~= '' then leaving_gang[#leaving_gang + 1] = gang .. '|' .. pod end
  add_demand(demand, resources, groups_text, -1)
  for _, device, slot in each_share(demand, grants_of(header, value)) do
    if device and slot >= 0 then set_slot(device, slot, '0') end
    if device then device[D_SLOT_MAP] = string.gsub(device[D_SLOT_MAP], '0+$', '') end
  end
  mark_freed(demand[1])
  if quota.on then quota.release(pod) end
  change_state(header, to_state)
  leases[pod] = false
  return with_header(header, value)
end

local answer, tenures = {encode(to_state == EXPIRED and #groups == ARGS[3])}, {}
for _, pod in ipairs(ending) do
  local state_before = headers[pod][L_STATE]
  local value = free_lease(pod, headers[pod], demands[pod], leases[pod])
  answer[#answer + 1] = value
  if state_before ~= RESERVED then
    tenures[#tenures + 1] = pod
    tenures[#tenures + 1] = value
  end
end
if #ending > 0 then
  call_all('HDEL', 'leases', ending)
  call_all('ZREM', 'lease-nodes', ending)
  call_all('SREM', 'vanished', ending)
  call_all('ZREM', 'silent', ending)
  repelling.remove(ending)
  call_all('ZREM', 'gang-leases', leaving_gang)
  for _, entry in ipairs(leaving_gang) do
    local gang = string.match(entry, '^([^|]*)|')
    if first_of_gang(gang) then mark_gang_changed(gang) end
  end
  delete_removed_nodes()
  claims.reserve_freed(names)
  write_changes(cause)
end
append_tenures('ended', tenures)
if #groups > 0 then call('ZREM', PREFIX .. 'expiring', unpack(groups)) end
return answer

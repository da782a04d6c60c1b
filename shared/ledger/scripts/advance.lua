-- Advance leases to their next state. Arguments: {'bound', rows of {pod, version that the caller read, device and fence
-- of its first share ('' and -1 without shares)}} or {'active', rows of {pod, node}}: a lease on another node stays.
-- Returns numbers, and leases. Per row: -1 and the lease; or, if the life cycle does not allow it, the stored version,
-- or 0 without a lease on that node.
local to, rows = ARGS[1], ARGS[2]
local to_state = to == 'bound' and BOUND or ACTIVE
fetch_leases_of(rows)

-- Is this the reservation that the caller read?
local function is_same_reservation(header, value, version, device, fence)
  if header[L_RESERVED_VERSION] == version or header[L_VERSION] == version then return true end
  local first_device, first_fence = first_grant(demand_of(header, value), grants_of(header, value))
  return first_device == device and first_fence == fence
end

-- True: the lease moves. False: it went there before, from the same reservation. Nil: it cannot.
local function moves(header, value, row)
  if MAY_BECOME[header[L_STATE]][to_state] then
    if to_state == BOUND and header[L_VERSION] ~= row[2] then return nil end
    return true
  end
  local is_there = header[L_STATE] == to_state
  if to_state == BOUND then is_there = is_same_reservation(header, value, row[2], row[3], row[4]) end
  if is_there then return false end
end

local numbers, answer, has_changed, tenures, gangs = {}, {''}, false, {}, {}

local function move(pod, header, value, state_to)
  change_state(header, state_to)
  value = put_header(pod, header, value)
  has_changed = true
  if state_to == BOUND then
    append(tenures, pod, value)
    local _, _, _, gang = description_of(header, value)
    if gang ~= '' then gangs[gang] = true end
  end
  return value
end

-- A gang is bound as a whole: once one of its pods is, none of its reservations expires.
local function bind_gang(gang)
  local members = gang_pods('gang-leases', gang)
  fetch('leases', members)
  for _, pod in ipairs(members) do
    local value = leases[pod]
    local header = value and header_of(value)
    if header and MAY_BECOME[header[L_STATE]][BOUND] then move(pod, header, value, BOUND) end
  end
end

for i, row in ipairs(rows) do
  local pod = row[1]
  local value, header, is_moving = leases[pod], nil, nil
  if value and to_state == ACTIVE and demand_of(header_of(value), value)[1] ~= row[2] then value = nil end
  if value then
    header = header_of(value)
    is_moving = moves(header, value, row)
  end
  if is_moving then value = move(pod, header, value, to_state) end
  numbers[i] = header and header[L_VERSION] or 0
  if is_moving ~= nil then
    numbers[i] = -1
    answer[#answer + 1] = value
  end
end
for gang in pairs(gangs) do bind_gang(gang) end
if has_changed then write_changes(to) end
append_tenures('held', tenures)
answer[1] = encode(numbers)
return answer

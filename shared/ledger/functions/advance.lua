-- Advance leases to their next state. Arguments: {'bound', rows of {pod, version that the caller read, device and fence
-- of its first share ('' and -1 without shares)}} or {'active', rows of {pod, node}}: a lease on another node stays.
-- Returns numbers, and leases. Per row: -1 and the lease; or, if the life cycle does not allow it, the stored version,
-- or 0 without a lease on that node.
local constants = require('constants')
local lease = require('lease')
local records = require('records')
local journal = require('tenures')
local values = require('values')
local waiting = require('waiting')
local writes = require('writes')
local encode = cmsgpack.pack
local L = lease.L

-- Is this the reservation that the caller read?
local function is_same_reservation(header, value, version, device, fence)
  if header[L.RESERVED_VERSION] == version or header[L.VERSION] == version then return true end
  local first_device, first_fence = lease.first_grant(lease.demand_of(header, value), lease.grants_of(header, value))
  return first_device == device and first_fence == fence
end

-- True: the lease moves. False: it went there before, from the same reservation. Nil: it cannot.
local function moves(header, value, row, to_state)
  if constants.MAY_BECOME[header[L.STATE]][to_state] then
    if to_state == constants.BOUND and header[L.VERSION] ~= row[2] then return nil end
    return true
  end
  local is_there = header[L.STATE] == to_state
  if to_state == constants.BOUND then is_there = is_same_reservation(header, value, row[2], row[3], row[4]) end
  if is_there then return false end
end

-- Move a lease, and return it. Pods with leases that are bound now are added to `tenures`, and their gangs to `gangs`.
local function move(pod, header, value, to_state, tenures, gangs)
  lease.change_state(header, to_state)
  value = records.put_header(pod, header, value)
  if to_state == constants.BOUND then
    values.append(tenures, pod, value)
    local _, _, _, gang = lease.description_of(header, value)
    if gang ~= '' then gangs[gang] = true end
  end
  return value
end

-- A gang is bound as a whole: once one of its pods is, none of its reservations expires.
local function bind_gang(gang, tenures)
  local members = waiting.gang_pods('gang-leases', gang)
  records.fetch('leases', members)
  for _, pod in ipairs(members) do
    local value = records.leases[pod]
    local header = value and lease.header_of(value)
    if header and constants.MAY_BECOME[header[L.STATE]][constants.BOUND] then
      move(pod, header, value, constants.BOUND, tenures, {})
    end
  end
end

return function(to, rows)
  local to_state = to == 'bound' and constants.BOUND or constants.ACTIVE
  local numbers, answer, has_changed, tenures, gangs = {}, {''}, false, {}, {}
  records.fetch_leases_of(rows)
  for i, row in ipairs(rows) do
    local pod = row[1]
    local value, header, is_moving = records.leases[pod], nil, nil
    if value and to_state == constants.ACTIVE and lease.demand_of(lease.header_of(value), value)[1] ~= row[2] then
      value = nil
    end
    if value then
      header = lease.header_of(value)
      is_moving = moves(header, value, row, to_state)
    end
    if is_moving then
      value = move(pod, header, value, to_state, tenures, gangs)
      has_changed = true
    end
    numbers[i] = header and header[L.VERSION] or 0
    if is_moving ~= nil then
      numbers[i] = -1
      answer[#answer + 1] = value
    end
  end
  for gang in pairs(gangs) do bind_gang(gang, tenures) end
  if has_changed then writes.write_changes(to) end
  journal.append('held', tenures)
  answer[1] = encode(numbers)
  return answer
end
